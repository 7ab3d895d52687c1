"""OpenAI's answers, built from a stream of events: whole objects, server-sent chunks, and errors."""

import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.errors import NodeError, TidepoolError
from controlplane.serving.in_flight import EventStream
from controlplane.serving.openai_requests import served_as
from dataplane.protocol.messages import Finished, Generate, Token

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """The fields that every object of one answer repeats."""

    id: str
    model: str
    created: int
    service_tier: str
    chat: bool

    @classmethod
    def of(cls, message: Generate, *, answer_id: str) -> "AnswerHead":
        """The head of the answer to a message; the answer begins now."""
        chat = message.messages is not None
        return cls(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{answer_id}",
            model=message.model,
            created=int(time.time()),
            service_tier=served_as(message.tier),
            chat=chat,
        )

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": self.service_tier,
            "system_fingerprint": None,
            "choices": choices,
        }

    def whole(self, text: str, end: Finished) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": end.finish_reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._object(kind, [choice]), "usage": usage_of(end)}

    def first_chunk(self) -> dict[str, Any] | None:
        """The chunk that names the role; completions have none."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None}, None) if self.chat else None

    def text_chunk(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text}, None) if self.chat else self._completion_chunk(text, None)

    def text_frame(self) -> tuple[bytes, bytes]:
        """The bytes before and after the text, as JSON, in the server-sent event of any piece of text."""
        placeholder = "\0text"
        before, _, after = sse(self.text_chunk(placeholder)).rpartition(msgspec.json.encode(placeholder))
        return before, after

    def last_chunk(self, end: Finished) -> dict[str, Any]:
        """The chunk with the finish reason."""
        return self._chunk({}, end.finish_reason) if self.chat else self._completion_chunk("", end.finish_reason)

    def usage_chunk(self, end: Finished) -> dict[str, Any]:
        """The extra chunk of `stream_options.include_usage`."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._object(kind, []), "usage": usage_of(end)}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._object("chat.completion.chunk", [choice])

    def _completion_chunk(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return self._object("text_completion", [choice])


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def openai_error(error: TidepoolError) -> dict[str, Any]:
    """The error object that OpenAI's clients parse, always with all four keys."""
    default = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def usage_of(end: Finished) -> dict[str, int]:
    """OpenAI's `usage` object."""
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


async def collect(stream: EventStream, head: AnswerHead) -> dict[str, Any]:
    """The whole answer of a stream.

    Raises:
        NodeError: the stream broke off.
    """
    text: list[str] = []
    end: Finished | None = None
    async with aclosing(stream):
        async for events in stream:
            for event in events:
                if isinstance(event, Token):
                    text.append(event.text)
                elif isinstance(event, Finished):
                    end = event
    if end is None:
        raise NodeError("the node ended the stream without a finish reason")
    return head.whole("".join(text), end)
