"""A response while it is answered: the events of a node become its items, and the server-sent events that tell of them
in OpenAI's order.
"""

import time
from collections.abc import Callable
from typing import Any

from controlplane.errors import TidepoolError
from controlplane.serving.answers import tool_call_id
from controlplane.serving.openai_answers import openai_error, token_logprob
from controlplane.serving.responses.items import Item, item_id
from controlplane.serving.responses.output_items import (
    Body,
    CallOutput,
    Logprobs,
    MessageOutput,
    OutputItem,
    ReasoningOutput,
    Status,
)
from dataplane.protocol.messages import Finished, Token, ToolCallDelta
from dataplane.protocol.records import RecordedEvent

_RATE_LIMITED = 429
_BAD_REQUEST = range(400, 429)


class ResponseWriter:
    """Writes one response. `head`: the response object before its answer, with its id."""

    def __init__(self, head: dict[str, Any], *, clock: Callable[[], float] = time.time) -> None:
        self._head = head
        self._clock = clock
        self._events = 0
        self._done: list[Item] = []
        self._open: OutputItem | None = None
        self._call_index = -1
        self._waiting: Logprobs = []
        self._end: dict[str, Any] = {}

    @property
    def has_ended(self) -> bool:
        """Whether the response is whole, or has failed."""
        return bool(self._end)

    def note_not_stored(self) -> None:
        """Let the response say that it cannot be retrieved."""
        self._head = {**self._head, "store": False}

    def response(self) -> dict[str, Any]:
        """The response object as it is now."""
        return {**self._head, "output": list(self._done), **self._end}

    def begin(self) -> list[Body]:
        """The events before any answer."""
        return [self._of_response(kind) for kind in ("response.created", "response.in_progress")]

    def write(self, event: RecordedEvent) -> list[Body]:
        """The events that tell of an event of a node. With `Finished` the response is whole, and its last event is
        `ended`.
        """
        if isinstance(event, Token):
            return self._write_token(event)
        return self._finish(event) if isinstance(event, Finished) else []

    def ended(self) -> Body:
        """The last event of a response that has ended."""
        return self._of_response(f"response.{self._end['status']}")

    def failed(self, error: TidepoolError) -> list[Body]:
        """The events of an answer that broke off. The first carries the response; the second has the error also as an
        object, by which OpenAI's clients raise an exception.
        """
        self._open = None
        self._end = {"status": "failed", "error": {"code": _failure_code(error.status), "message": error.message}}
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        told |= openai_error(error)
        return [self._of_response("response.failed"), self._numbered(told)]

    def _write_token(self, token: Token) -> list[Body]:
        told: list[Body] = []
        if token.reasoning:
            told += self._open_as(ReasoningOutput)
            assert isinstance(self._open, ReasoningOutput)
            told.append(self._of_item(self._open.add(token.reasoning)))
        told += self._write_text(token)
        for delta in token.tool_calls:
            told += self._write_call(delta)
        return told

    def _write_text(self, token: Token) -> list[Body]:
        """Log probabilities of tokens whose text is still to come wait for it."""
        if token.reasoning or token.tool_calls:
            self._waiting = []
        elif token.logprobs:
            self._waiting += map(token_logprob, token.logprobs)
        if not token.text:
            return []
        told = self._open_as(MessageOutput)
        assert isinstance(self._open, MessageOutput)
        told.append(self._of_item(self._open.add(token.text, self._waiting)))
        self._waiting = []
        return told

    def _write_call(self, delta: ToolCallDelta) -> list[Body]:
        told: list[Body] = []
        if delta.index != self._call_index or not isinstance(self._open, CallOutput):
            self._call_index = delta.index
            call_id = tool_call_id(self._head["id"], delta.index)
            told += self._close("completed")
            told += self._begin(CallOutput(self._item_id("function_call"), call_id, delta.name or ""))
        assert isinstance(self._open, CallOutput)
        if delta.arguments:
            told.append(self._of_item(self._open.add(delta.arguments)))
        return told

    def _finish(self, end: Finished) -> list[Body]:
        cut = end.finish_reason == "length"
        cut_call = isinstance(self._open, CallOutput) and end.finish_reason != "tool_calls"
        told: list[Body] = []
        if self._open is None and not self._done:
            told += self._open_as(MessageOutput)
        told += self._close("incomplete" if cut or cut_call else "completed")
        self._end = {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(self._clock()),
            "usage": usage(end),
        }
        return told

    def _open_as(self, kind: type[MessageOutput] | type[ReasoningOutput]) -> list[Body]:
        """Make an item of this kind the one that is written, unless it is already."""
        if isinstance(self._open, kind):
            return []
        name = "message" if kind is MessageOutput else "reasoning"
        return self._close("completed") + self._begin(kind(self._item_id(name)))

    def _begin(self, item: OutputItem) -> list[Body]:
        self._open = item
        added = self._item_event("added", item.item("in_progress"))
        return [added, *map(self._of_item, item.begin())]

    def _close(self, status: Status) -> list[Body]:
        if self._open is None:
            return []
        whole = self._open.item(status)
        told = [*map(self._of_item, self._open.end()), self._item_event("done", whole)]
        self._done.append(whole)
        self._open = None
        return told

    def _item_id(self, kind: str) -> str:
        return item_id(kind, self._head["id"], str(len(self._done)))

    def _item_event(self, what: str, item: Item) -> Body:
        """An event with the item that is written, which is the next one in the output."""
        return self._numbered({"type": f"response.output_item.{what}", "output_index": len(self._done), "item": item})

    def _of_item(self, body: Body) -> Body:
        """An event of a part of the item that is written."""
        assert self._open is not None
        return self._numbered({**body, "item_id": self._open.item_id, "output_index": len(self._done)})

    def _of_response(self, kind: str) -> Body:
        return self._numbered({"type": kind, "response": self.response()})

    def _numbered(self, body: Body) -> Body:
        number = self._events
        self._events += 1
        return {**body, "sequence_number": number}


def usage(end: Finished) -> dict[str, Any]:
    """The `usage` object of this API."""
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


def _failure_code(status: int) -> str:
    """OpenAI's codes of failed responses are few."""
    if status == _RATE_LIMITED:
        return "rate_limit_exceeded"
    return "invalid_prompt" if status in _BAD_REQUEST else "server_error"
