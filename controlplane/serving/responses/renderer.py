"""Answers of the Responses API as endpoints make them: the writer's events as bytes."""

import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from controlplane.errors import NodeError, TidepoolError
from controlplane.serving.answers import ChoiceAnswer, Renderer, named_sse
from controlplane.serving.fan_out import ChoiceStream, TokenUsage
from controlplane.serving.query import Query
from controlplane.serving.responses.writer import ResponseWriter
from dataplane.protocol.messages import Token, ToolCallDelta
from dataplane.protocol.records import RecordedEvent


class ResponseRenderer(Renderer):
    """The shape of responses. The query's options are the response object before its answer."""

    def __init__(self, query: Query, *, answer_id: str, include_usage: bool = False) -> None:
        super().__init__(query, answer_id=answer_id, include_usage=include_usage)
        self.response_id = f"resp_{answer_id}"
        head = {"id": self.response_id, "created_at": int(time.time()), **query.options, "model": query.model}
        self.writer = ResponseWriter(head)

    def whole(self, answers: Sequence[ChoiceAnswer], usage: TokenUsage) -> dict[str, Any]:
        """The response. Log probabilities are those of all tokens, so they are shown where all tokens are text."""
        [answer] = answers
        only_text = not answer.reasoning and not answer.tool_calls
        calls = [
            ToolCallDelta(index=index, name=call.name, arguments="".join(call.arguments))
            for index, call in enumerate(answer.tool_calls)
        ]
        for token in (
            Token(text="", reasoning=answer.reasoning),
            Token(text=answer.text, logprobs=tuple(answer.logprobs) if only_text else ()),
            Token(text="", tool_calls=tuple(calls)),
        ):
            self.writer.write(token)
        assert answer.end is not None
        self.writer.write(answer.end)
        return self.writer.response()

    def begin(self) -> bytes:
        return named_sse(self.writer.begin())

    def events(self, choice: int, events: list[RecordedEvent]) -> bytes:
        return b"".join(named_sse(self.writer.write(event)) for event in events)

    def end(self, usage: TokenUsage) -> bytes:
        return named_sse([self.writer.ended()])

    def failure(self, error: TidepoolError) -> bytes:
        return named_sse(self.writer.failed(error))

    async def write_all(self, events: ChoiceStream) -> None:
        """Write the response to its end.

        Raises:
            NodeError: the stream broke off.
        """
        async with aclosing(events):
            async for choice, arrived in events:
                self.events(choice, arrived)
        if not self.writer.has_ended:
            raise NodeError("the node ended the stream without a finish reason")
