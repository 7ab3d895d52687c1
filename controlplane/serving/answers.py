"""Answers, built from the events of a query by a renderer for each endpoint: whole, or as server-sent events."""

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from controlplane.errors import NodeError, TidepoolError
from controlplane.serving.fan_out import ChoiceStream, InFlightQuery, TokenUsage
from controlplane.serving.query import Query
from dataplane.protocol.messages import Finished, Pooled, Token, TokenLogprob
from dataplane.protocol.records import RecordedEvent

_ID_BYTES = 12


@dataclass
class CalledTool:
    """A tool call of an answer, as far as it has arrived. `arguments`: pieces of JSON text."""

    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass
class ChoiceAnswer:
    """One answer of a query, as far as it has arrived. `texts` and `thoughts` are pieces; `values` are those of a model
    that does not generate.
    """

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    tool_calls: list[CalledTool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    values: Sequence[float] = ()
    end: Finished | None = None

    def note(self, event: RecordedEvent) -> None:
        if isinstance(event, Token):
            self.texts.append(event.text)
            self.thoughts.append(event.reasoning)
            self.logprobs += event.logprobs
            for delta in event.tool_calls:
                while len(self.tool_calls) <= delta.index:
                    self.tool_calls.append(CalledTool())
                called = self.tool_calls[delta.index]
                called.name = delta.name or called.name
                called.arguments.append(delta.arguments)
        elif isinstance(event, Pooled):
            self.values = array("f", event.values)  # an eighth of the memory of a tuple of numbers
        elif isinstance(event, Finished):
            self.end = event

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    @property
    def finish_reason(self) -> str | None:
        return None if self.end is None else self.end.finish_reason

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of its tokens; that of an answer without tokens is 0."""
        return sum(each.token.logprob for each in self.logprobs) / max(1, len(self.logprobs))


class Renderer(ABC):
    """Makes the answer to one query. A stream is `begin`, then `events` as they arrive, then `end` or `failure`; each
    gives the bytes to write, which may be none.
    """

    def __init__(self, query: Query, *, answer_id: str, include_usage: bool = False) -> None:
        self.query = query
        self.answer_id = answer_id
        self.include_usage = include_usage

    @abstractmethod
    def whole(self, answers: Sequence[ChoiceAnswer], usage: TokenUsage) -> dict[str, Any]:
        """The answer of a query that does not stream: `n` choices of each prompt, in order."""

    @abstractmethod
    def begin(self) -> bytes:
        """What precedes the first events."""

    @abstractmethod
    def events(self, choice: int, events: list[RecordedEvent]) -> bytes:
        """The events of one choice that arrived together."""

    def text_frame(self, choice: int) -> tuple[str, str] | None:
        """What stands before and after the text of a choice, written as a JSON string, in an event that is nothing but
        text; None: there is no such event. Nodes may write these events themselves.
        """
        return None

    @abstractmethod
    def end(self, usage: TokenUsage) -> bytes:
        """What follows the last events."""

    @abstractmethod
    def failure(self, error: TidepoolError) -> bytes:
        """The last event of a stream that broke."""


async def whole_answer(stream: ChoiceStream, query: InFlightQuery, renderer: Renderer) -> dict[str, Any]:
    """The whole answer of a stream. Of each prompt's answers it holds the `n` with the highest mean log probability, in
    this order, if more were generated.

    Raises:
        NodeError: the stream broke off.
    """
    answers = [ChoiceAnswer() for _ in query.choices]
    async with aclosing(stream):
        async for choice, events in stream:
            for event in events:
                answers[choice].note(event)
    if any(answer.end is None for answer in answers):
        raise NodeError("the node ended the stream without a finish reason")
    return renderer.whole(_best(answers, query.query), query.usage())


def _best(answers: list[ChoiceAnswer], query: Query) -> list[ChoiceAnswer]:
    if query.n == query.best_of:
        return answers
    chosen: list[ChoiceAnswer] = []
    for first in range(0, len(answers), query.best_of):
        of_prompt = answers[first : first + query.best_of]
        chosen += sorted(of_prompt, key=lambda answer: -answer.mean_logprob)[: query.n]
    return chosen


def tool_call_id(answer_id: str, index: int, *, choice: int = 0, prefix: str = "call") -> str:
    """The id of a tool call: the same whenever it is made of the same answer."""
    digest = hashlib.blake2b(f"{answer_id}:{choice}:{index}".encode(), digest_size=_ID_BYTES)
    return f"{prefix}_{digest.hexdigest()}"


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_sse(bodies: Iterable[dict[str, Any]]) -> bytes:
    """Server-sent events that are named by their `type`."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (body["type"].encode(), msgspec.json.encode(body)) for body in bodies)
