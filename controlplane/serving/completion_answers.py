"""Answers of completions, OpenAI's older shape."""

from collections.abc import Sequence
from typing import Any

from controlplane.serving.answers import ChoiceAnswer
from controlplane.serving.openai_answers import OpenAIRenderer
from dataplane.protocol.messages import Token, TokenLogprob


class CompletionRenderer(OpenAIRenderer):
    """The shape of completions: text, and log probabilities of its tokens."""

    whole_kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def begin(self) -> bytes:
        """The chunks with the prompts, if they shall be echoed."""
        super().begin()
        self._offsets = [0] * self._count
        echoed = [(index, self._echo(index)) for index in range(self._count)]
        return b"".join(self.chunk(_choice(index, text)) for index, text in echoed if text)

    def choice(self, index: int, answer: ChoiceAnswer) -> dict[str, Any]:
        logprobs = completion_logprobs(answer.logprobs, 0) if self._shows_logprobs else None
        return _choice(index, self._echo(index) + answer.text, logprobs=logprobs, finish_reason=answer.finish_reason)

    def _echo(self, index: int) -> str:
        """What a choice's text begins with."""
        prompt = self.query.prompts[index // self.query.n].prompt or ""
        return prompt if self.query.options.get("echo") else ""

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return _choice(index, text)

    def rich_choice(self, index: int, event: Token) -> dict[str, Any]:
        logprobs = completion_logprobs(event.logprobs, self._offsets[index]) if event.logprobs else None
        self._offsets[index] += sum(len(each.token.text) for each in event.logprobs)
        return _choice(index, event.text, logprobs=logprobs)

    def last_choice(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _choice(index, "", finish_reason=finish_reason)


def completion_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """The `logprobs` object of a choice whose first token's text is at that offset (characters)."""
    offsets = []
    for each in logprobs:
        offsets.append(offset)
        offset += len(each.token.text)
    return {
        "tokens": [each.token.text for each in logprobs],
        "token_logprobs": [each.token.logprob for each in logprobs],
        "top_logprobs": [{top.text: top.logprob for top in reversed(each.top)} for each in logprobs],
        "text_offset": offsets,
    }


def _choice(
    index: int, text: str, *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
