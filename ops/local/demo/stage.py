"""Shared by the steps of the demo: the stack and its clients, progress, and one streamed answer."""

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
    """A step failed; the message says how."""


@dataclass(kw_only=True)
class Demo:
    """The state that steps share. `models` are the tiny ones; `pretrained` is None where it is not available."""

    console: Console
    stack: LocalStack
    admin: Api
    client: openai.OpenAI
    models: list[TinyModel]
    pretrained: TinyModel | None = None
    took_s: dict[str, float] = field(default_factory=dict)

    @property
    def offered(self) -> list[TinyModel]:
        """Every model that is registered."""
        return [*self.models, *([] if self.pretrained is None else [self.pretrained])]

    @contextmanager
    def step(self, title: str, description: str) -> Iterator[None]:
        """A numbered step: its title, a description, and its duration."""
        self.console.print(f"\n[bold cyan]{len(self.took_s) + 1}. {title}[/]  [dim]{description}[/]")
        began_s = time.monotonic()
        yield
        self.took_s[title] = time.monotonic() - began_s

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar; the yielded function takes the number that is done."""
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
class Answer:
    """A streamed answer. Times are by `time.monotonic`."""

    region: str
    began_s: float
    first_s: float
    ended_s: float
    tokens: int
    text: str

    @property
    def waited_s(self) -> float:
        """Time to first token."""
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
    on_text: Callable[[str], None] = lambda _text: None,
) -> Answer:
    """Stream the greedy answer to `question`, asked from a region. `to_the_end`: generate all
    `max_tokens`. `on_text` is called with each piece of text.

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
                on_text(text[-1])
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
        served = stream.response.headers["x-tidepool-region"]
    if tokens == 0:
        raise DemoError(f"{model} generated no token")
    whole = "".join(text).replace("\n", " ")
    return Answer(region=served, began_s=began_s, first_s=first_s, ended_s=time.monotonic(), tokens=tokens, text=whole)
