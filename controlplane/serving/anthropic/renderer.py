"""Answers of the Messages API: content blocks, whole or as the server-sent events that tell of them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from controlplane.errors import TidepoolError
from controlplane.serving.answers import ChoiceAnswer, Renderer, named_sse, tool_call_id
from controlplane.serving.anthropic.errors import anthropic_error
from controlplane.serving.fan_out import TokenUsage
from controlplane.serving.query import Query
from dataplane.protocol.messages import Finished, Started, Token, ToolCallDelta
from dataplane.protocol.records import RecordedEvent
from dataplane.protocol.tiers import Tier

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TIERS = {Tier.IW_F: "priority", Tier.IW_N: "standard", Tier.NIW: "batch"}
Body = dict[str, Any]


class MessagesRenderer(Renderer):
    """The shape of messages. A stream begins when a node has counted the prompt."""

    def __init__(self, query: Query, *, answer_id: str, include_usage: bool = False) -> None:
        super().__init__(query, answer_id=answer_id, include_usage=include_usage)
        self._has_begun = False
        self._blocks = 0
        self._open: str | None = None
        self._end: Finished | None = None

    def whole(self, answers: Sequence[ChoiceAnswer], usage: TokenUsage) -> dict[str, Any]:
        [answer] = answers
        content: list[Body] = []
        if answer.reasoning:
            content.append(_thinking(answer.reasoning))
        if answer.text:
            content.append(_text(answer.text))
        for index, call in enumerate(answer.tool_calls):
            content.append(self._tool_use(index, call.name, _arguments("".join(call.arguments))))
        told = self._message(content, self._usage(usage))
        return {**told, "stop_reason": _STOP_REASONS[answer.finish_reason or "stop"]}

    def begin(self) -> bytes:
        return b""

    def events(self, choice: int, events: list[RecordedEvent]) -> bytes:
        return named_sse(body for event in events for body in self._told(event))

    def end(self, usage: TokenUsage) -> bytes:
        reason = _STOP_REASONS["stop" if self._end is None else self._end.finish_reason]
        delta = {"stop_reason": reason, "stop_sequence": None}
        return named_sse(
            [{"type": "message_delta", "delta": delta, "usage": self._usage(usage)}, {"type": "message_stop"}]
        )

    def failure(self, error: TidepoolError) -> bytes:
        return named_sse([anthropic_error(error)])

    def _told(self, event: RecordedEvent) -> list[Body]:
        if isinstance(event, Token):
            return self._token(event)
        if isinstance(event, Finished):
            self._end = event
            return self._close()
        if isinstance(event, Started) and not self._has_begun:
            self._has_begun = True
            message = self._message([], self._usage(TokenUsage(prompt_tokens=event.prompt_tokens)))
            return [{"type": "message_start", "message": message}, {"type": "ping"}]
        return []

    def _token(self, token: Token) -> list[Body]:
        told: list[Body] = []
        if token.reasoning:
            told += self._open_as("thinking", _thinking(""))
            told.append(self._delta({"type": "thinking_delta", "thinking": token.reasoning}))
        if token.text:
            told += self._open_as("text", _text(""))
            told.append(self._delta({"type": "text_delta", "text": token.text}))
        for delta in token.tool_calls:
            told += self._call(delta)
        return told

    def _call(self, delta: ToolCallDelta) -> list[Body]:
        told = self._open_as(f"tool_use {delta.index}", self._tool_use(delta.index, delta.name or "", {}))
        if delta.arguments:
            told.append(self._delta({"type": "input_json_delta", "partial_json": delta.arguments}))
        return told

    def _open_as(self, name: str, block: Body) -> list[Body]:
        """Begin this block, unless it is the one that is written already."""
        if self._open == name:
            return []
        told = self._close()
        self._open = name
        return [*told, {"type": "content_block_start", "index": self._blocks, "content_block": block}]

    def _close(self) -> list[Body]:
        if self._open is None:
            return []
        self._open = None
        self._blocks += 1
        return [{"type": "content_block_stop", "index": self._blocks - 1}]

    def _delta(self, delta: Body) -> Body:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _message(self, content: list[Body], usage: Body) -> Body:
        return {
            "id": f"msg_{self.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": self.query.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, "service_tier": _TIERS[self.query.tier]},
        }

    def _tool_use(self, index: int, name: str, arguments: Body) -> Body:
        call_id = tool_call_id(self.answer_id, index, prefix="toolu")
        return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}

    def _usage(self, usage: TokenUsage) -> Body:
        """Tokens of the prompt are counted either as read from the cache or as input."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _text(text: str) -> Body:
    return {"type": "text", "text": text, "citations": None}


def _thinking(text: str) -> Body:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _arguments(text: str) -> Body:
    """The input of a tool; that of a call which was cut is empty."""
    try:
        read = msgspec.json.decode(text)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
