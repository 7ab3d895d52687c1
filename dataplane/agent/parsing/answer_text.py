"""The text of an answer from its tokens: content, reasoning and tool calls.

What comes out depends on the tokens alone, so another node that is given the tokens so far continues the same answer.
"""

from collections.abc import Iterable, Sequence

import msgspec

from dataplane.agent.detokenization import IncrementalDetokenizer
from dataplane.agent.parsing.reasoning import ReasoningParser
from dataplane.agent.parsing.tool_calls import ToolCallParser
from dataplane.protocol.messages import FinishReason, ToolCallDelta


class Parsed(msgspec.Struct, frozen=True):
    """New pieces of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __add__(self, other: "Parsed") -> "Parsed":
        return Parsed(
            self.content + other.content, self.reasoning + other.reasoning, self.tool_calls + other.tool_calls
        )

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class AnswerText:
    """Turns tokens into the pieces of an answer. `stopped`: at a stop string, or after the only call that was wanted;
    later tokens are ignored. Stop strings are looked for in all of the text, reasoning and calls included. The first
    `sent_chars` characters of content are left out: another instance has streamed them. `reasoning_tokens`: so far.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        *,
        reasoning: ReasoningParser | None = None,
        tools: ToolCallParser | None = None,
        sent_chars: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._reasoning = reasoning
        self._tools = tools
        self._sent_chars = sent_chars
        self._ended = False
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._detokenizer.stopped or (self._tools is not None and self._tools.stopped)

    def resume(self, token_ids: Iterable[int]) -> Parsed:
        """Add the tokens of another instance; the content of them that was not sent yet."""
        content = [self.feed(token_id).content for token_id in token_ids]
        return Parsed("".join(content))

    def feed(self, token_id: int) -> Parsed:
        """Add a token; the pieces that are certain with it."""
        if self.stopped:
            return Parsed()
        parsed = self._parse(self._detokenizer.feed(token_id))
        if self._reasoning is not None and self._reasoning.open:
            self.reasoning_tokens += 1
        return parsed + self._flush() if self._detokenizer.stopped else parsed

    def feed_all(self, token_ids: Sequence[int]) -> tuple[Parsed, int]:
        """Add tokens up to the one at which the answer stops; the pieces that are certain with them, and how many
        tokens were added.
        """
        new = Parsed()
        for number, token_id in enumerate(token_ids, 1):
            if self._tools is None and (self._reasoning is None or self._reasoning.is_over()):
                parsed = Parsed(self._unsent(self._detokenizer.feed(token_id)))
            else:
                parsed = self.feed(token_id)
            new = new + parsed if new else parsed
            if self.stopped:
                return new, number
        return new, len(token_ids)

    def finish(self) -> Parsed:
        """What was held back, when no token follows."""
        return self._parse(self._detokenizer.finish()) + self._flush()

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._detokenizer.token_bytes(token_id)

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """Why the answer ended: `tool_calls` where it would be `stop`, a tool was called, and no call was cut."""
        return "tool_calls" if reason == "stop" and self._tools is not None and self._tools.called else reason

    def _parse(self, text: str) -> Parsed:
        if not text:
            return Parsed()
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text)
        return self._answer(text, reasoning)

    def _flush(self) -> Parsed:
        """What the parsers hold back. Once."""
        if self._ended:
            return Parsed()
        self._ended = True
        reasoning, text = ("", "") if self._reasoning is None else self._reasoning.finish()
        parsed = self._answer(text, reasoning)
        if self._tools is None:
            return parsed
        content, calls = self._tools.finish()
        return parsed + Parsed(self._unsent(content), "", calls)

    def _answer(self, text: str, reasoning: str) -> Parsed:
        if self._tools is None or not text:
            return Parsed(self._unsent(text), reasoning)
        content, calls = self._tools.feed(text)
        return Parsed(self._unsent(content), reasoning, calls)

    def _unsent(self, content: str) -> str:
        if not self._sent_chars:
            return content
        skipped = min(self._sent_chars, len(content))
        self._sent_chars -= skipped
        return content[skipped:]
