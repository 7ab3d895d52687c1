"""Answers of chat completions, as OpenAI's clients read them."""

from collections.abc import Sequence
from typing import Any

from controlplane.serving.answers import ChoiceAnswer, tool_call_id
from controlplane.serving.openai_answers import OpenAIRenderer, token_logprob
from dataplane.protocol.messages import Token, TokenLogprob, ToolCallDelta


class ChatRenderer(OpenAIRenderer):
    """The shape of chat completions. `reasoning_content` is what the model thought before its answer."""

    whole_kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def begin(self) -> bytes:
        """The chunks that name the role of each choice."""
        super().begin()
        role = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self.chunk(_delta(index, role)) for index in range(self._count))

    def choice(self, index: int, answer: ChoiceAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if answer.tool_calls and not answer.text else answer.text,
            "refusal": None,
            "annotations": [],
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [
                {
                    "id": tool_call_id(self.answer_id, number, choice=index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for number, call in enumerate(answer.tool_calls)
            ]
        logprobs = chat_logprobs(answer.logprobs) if self._shows_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return _delta(index, {"content": text})

    def rich_choice(self, index: int, event: Token) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if event.reasoning:
            delta["reasoning_content"] = event.reasoning
        if event.text:
            delta["content"] = event.text
        if event.tool_calls:
            delta["tool_calls"] = [self._call_delta(index, each) for each in event.tool_calls]
        return _delta(index, delta, logprobs=chat_logprobs(event.logprobs) if event.logprobs else None)

    def last_choice(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _delta(index, {}, finish_reason=finish_reason)

    def _call_delta(self, choice: int, delta: ToolCallDelta) -> dict[str, Any]:
        if delta.name is None:
            return {"index": delta.index, "function": {"arguments": delta.arguments}}
        function = {"name": delta.name, "arguments": delta.arguments}
        call_id = tool_call_id(self.answer_id, delta.index, choice=choice)
        return {"index": delta.index, "id": call_id, "type": "function", "function": function}


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a choice, and of its chunks."""
    return {"content": list(map(token_logprob, logprobs)), "refusal": None}


def _delta(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
