"""What answers of chat completions and of completions have in common: head, frames, usage and errors."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from controlplane.errors import InsufficientQuotaError, TidepoolError
from controlplane.serving.answers import ChoiceAnswer, Renderer, sse
from controlplane.serving.fan_out import TokenUsage
from controlplane.serving.openai_requests import served_as
from controlplane.serving.query import Query
from dataplane.protocol.messages import Finished, Token, TokenLogprob, TopLogprob
from dataplane.protocol.records import RecordedEvent, TextRecord

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_PLACEHOLDER = "\0here"
_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class OpenAIRenderer(Renderer):
    """Both shapes are an object with `choices`, each with an index. A piece of text is written between two byte strings
    that are made once for each choice, since most events are nothing else.
    """

    whole_kind: str
    chunk_kind: str
    id_prefix: str

    def __init__(self, query: Query, *, answer_id: str, include_usage: bool = False) -> None:
        super().__init__(query, answer_id=answer_id, include_usage=include_usage)
        self._count = query.n * len(query.prompts)
        self._shows_logprobs = not query.options.get("hide_logprobs") and query.prompts[0].sampling.logprobs is not None
        self._head = {
            "id": f"{self.id_prefix}-{answer_id}",
            "object": self.chunk_kind,
            "created": int(time.time()),
            "model": query.model,
            "service_tier": served_as(query.tier),
            "system_fingerprint": None,
        }

    @abstractmethod
    def choice(self, index: int, answer: ChoiceAnswer) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """The choice of a chunk with nothing but text."""

    @abstractmethod
    def rich_choice(self, index: int, event: Token) -> dict[str, Any]:
        """The choice of a chunk with more than text."""

    @abstractmethod
    def last_choice(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The choice of the chunk that ends it."""

    def whole(self, answers: Sequence[ChoiceAnswer], usage: TokenUsage) -> dict[str, Any]:
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._head, "object": self.whole_kind, "choices": choices, "usage": openai_usage(usage)}

    @cached_property
    def _chunk_frame(self) -> tuple[bytes, bytes]:
        return _frame({**self._head, "choices": [_PLACEHOLDER]})

    @cached_property
    def _text_frames(self) -> list[tuple[bytes, bytes]]:
        choices = (self.text_choice(index, _PLACEHOLDER) for index in range(self._count))
        return [_frame({**self._head, "choices": [choice]}) for choice in choices]

    def text_frame(self, choice: int) -> tuple[str, str] | None:
        before, after = self._text_frames[choice]
        return before.decode(), after.decode()

    def begin(self) -> bytes:
        return b""

    def events(self, choice: int, events: list[RecordedEvent]) -> bytes:
        before, after = self._text_frames[choice]
        pieces: list[bytes] = []
        for event in events:
            if isinstance(event, TextRecord):
                pieces.append(event.payload)
            elif isinstance(event, Token):
                if event.logprobs or event.reasoning or event.tool_calls:
                    pieces.append(self.chunk(self.rich_choice(choice, event)))
                elif event.text:
                    pieces += (before, _encode(event.text), after)
            elif isinstance(event, Finished):
                pieces.append(self.chunk(self.last_choice(choice, event.finish_reason)))
        return b"".join(pieces)

    def end(self, usage: TokenUsage) -> bytes:
        if not self.include_usage:
            return _DONE
        return sse({**self._head, "choices": [], "usage": openai_usage(usage)}) + _DONE

    def failure(self, error: TidepoolError) -> bytes:
        return sse(openai_error(error))

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """The server-sent event of a chunk with this choice."""
        before, after = self._chunk_frame
        return before + _encode(choice) + after


def _frame(value: dict[str, Any]) -> tuple[bytes, bytes]:
    """The bytes of a server-sent event before and after its placeholder."""
    before, _, after = sse(value).rpartition(_encode(_PLACEHOLDER))
    return before, after


def openai_error(error: TidepoolError) -> dict[str, Any]:
    """The error object that OpenAI's clients parse, always with all four keys."""
    default = "invalid_request_error" if error.status < 500 else "server_error"
    kind = error.code if isinstance(error, InsufficientQuotaError) else _OPENAI_TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def token_logprob(logprob: TokenLogprob) -> dict[str, Any]:
    """The log probability of a token of the answer, as chat completions and responses have it."""
    return {**_logprob(logprob.token), "top_logprobs": list(map(_logprob, logprob.top))}


def _logprob(token: TopLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


def openai_usage(usage: TokenUsage) -> dict[str, Any]:
    """The `usage` object of both shapes."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
