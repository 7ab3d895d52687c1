"""What the steps of the demo share: the stack and its clients, progress on the screen, and one streamed answer."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import openai
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ops.client.api import Api, CommandError
from ops.local.stack import LocalStack
from ops.local.tiny_models import TinyModel

ServiceTier = Literal["priority", "default"]
QUESTION = "How does the tide know when to come?"
ANSWER_TOKENS = 24
_WAIT_S = 240.0
_POLL_S = 0.25


class DemoError(CommandError):
    """A step did not come out as it must; the message says how."""


@dataclass(kw_only=True)
class Demo:
    """What the steps share. `models` are the tiny ones; `speaking` is None where it cannot be had."""

    console: Console
    stack: LocalStack
    admin: Api
    client: openai.OpenAI
    models: list[TinyModel]
    speaking: TinyModel | None = None
    took_s: dict[str, float] = field(default_factory=dict)

    @property
    def offered(self) -> list[TinyModel]:
        """Every model that is registered."""
        return [*self.models, *([] if self.speaking is None else [self.speaking])]

    @contextmanager
    def step(self, title: str, words: str) -> Iterator[None]:
        """A numbered step: its title, plain words, and how long it took."""
        self.console.print(f"\n[bold cyan]{len(self.took_s) + 1}. {title}[/]  [dim]{words}[/]")
        began_s = time.monotonic()
        yield
        self.took_s[title] = time.monotonic() - began_s

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar; the block calls what it gets with how many are done."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.update(task, completed=done)

    def wait(self, title: str, total: int, done: Callable[[], int]) -> None:
        """Show progress until `done()` reaches `total`.

        Raises:
            DemoError: it does not within four minutes.
        """
        deadline_s = time.monotonic() + _WAIT_S
        with self.progress(title, total) as show:
            while (count := done()) < total:
                show(count)
                if time.monotonic() > deadline_s:
                    raise DemoError(
                        f"{title}: {count} of {total} after {_WAIT_S:g} s; logs are in {self.stack.home}/logs"
                    )
                time.sleep(_POLL_S)
            show(total)


@dataclass(frozen=True, kw_only=True)
class Said:
    """What came out of a stream. Times are by `time.monotonic`."""

    region: str
    began_s: float
    first_s: float
    ended_s: float
    tokens: int
    text: str

    @property
    def waited_s(self) -> float:
        """From the question to the first token."""
        return self.first_s - self.began_s


def ask(
    client: openai.OpenAI,
    model: str,
    region: str,
    *,
    service_tier: ServiceTier = "default",
    max_tokens: int = ANSWER_TOKENS,
    to_the_end: bool = False,
    question: str = QUESTION,
    heard: Callable[[str], None] = lambda _text: None,
) -> Said:
    """Stream the greedy answer to `question`, asked from a region. `to_the_end`: all `max_tokens`, come what may.
    `heard` is called with each piece of text as it comes.

    Raises:
        DemoError: the answer has no token.
    """
    began_s = time.monotonic()
    first_s = 0.0
    text: list[str] = []
    tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        service_tier=service_tier,
        extra_headers={"x-tidepool-region": region},
        extra_body={"ignore_eos": to_the_end},
    )
    with stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first_s = first_s or time.monotonic()
                text.append(chunk.choices[0].delta.content)
                heard(text[-1])
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
        served = stream.response.headers["x-tidepool-region"]
    if tokens == 0:
        raise DemoError(f"{model} made no token")
    words = "".join(text).replace("\n", " ")
    return Said(region=served, began_s=began_s, first_s=first_s, ended_s=time.monotonic(), tokens=tokens, text=words)
