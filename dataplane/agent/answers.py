"""From a Generate message to its stream of events."""

import secrets
from collections.abc import AsyncIterator, Callable, Sequence

from dataplane.agent.detokenization import IncrementalDetokenizer
from dataplane.agent.measures import RequestMeasure
from dataplane.agent.parsing.answer_text import AnswerText, Parsed
from dataplane.agent.parsing.families import Families
from dataplane.agent.parsing.reasoning import ReasoningParser
from dataplane.agent.parsing.tool_calls import ToolCallParser
from dataplane.agent.tokenization import Tokenizer
from dataplane.dispatch.requests import InflightRequest
from dataplane.engines.interface import EngineOutput, EngineRequest, TokenScore
from dataplane.protocol.errors import BadRequestError, ContextLengthError, DataplaneError
from dataplane.protocol.messages import (
    ANSWER_FAILED,
    Constraint,
    Failed,
    Finished,
    FinishReason,
    Generate,
    ModelSpec,
    Started,
    StreamEvent,
    Token,
    TokenLogprob,
    TopLogprob,
)
from dataplane.runtime.tracing import current_parent

_NOTHING = Parsed()
RETRYABLE_STATUSES = frozenset({409, 429, 500, 503})
"""Refusals for reasons other than the request itself: another instance may take it."""


def failed_event(error: DataplaneError) -> Failed:
    """The error as a stream event."""
    return Failed(
        status=error.status,
        code=error.code,
        message=error.message,
        param=error.param,
        retryable=error.status in RETRYABLE_STATUSES and error.code != ANSWER_FAILED,
    )


def engine_request(
    generate: Generate,
    prompt: tuple[int, ...],
    model: ModelSpec,
    *,
    tokens_max: int,
    constraint: Constraint | None = None,
) -> EngineRequest:
    """The request for the engine: prompt and answer have at most `tokens_max` tokens together, and without `max_tokens`
    the answer may use all that the prompt leaves.

    Raises:
        ContextLengthError: prompt and answer do not fit the context or the worker's KV memory.
    """
    sampling = generate.sampling
    max_tokens = sampling.max_tokens if sampling.max_tokens is not None else max(1, tokens_max - len(prompt))
    if len(prompt) + max_tokens > tokens_max:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}; "
            f"together {model.name} takes at most {tokens_max} here",
            param="max_tokens" if sampling.max_tokens is not None else "messages",
        )
    return EngineRequest(
        request_id=generate.request_id,
        instance_id=generate.instance_id,
        tier=generate.tier,
        objective=generate.objective,
        prompt=prompt,
        generated=generate.generated,
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.seed is not None else secrets.randbits(31),
        ignore_eos=sampling.ignore_eos,
        constraint=constraint,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
        cache_salt=generate.cache_salt,
        trace=current_parent(),
    )


def answer_text(generate: Generate, tokenizer: Tokenizer, families: Families, tail: str) -> AnswerText:
    """The text of an answer, before any token. Tool calls are looked for where the request has tools that may be
    called, reasoning in every conversation; `tail` is the end of the prompt, which may have begun the reasoning.
    """
    chat, uses = generate.messages is not None, generate.tools
    form = families.reasoning if chat else None
    family = families.tools if chat and uses is not None and uses.choice != "none" else None
    markers = (*(() if form is None else form.markers), *(() if family is None else family.markers))
    ids = {marker: tokenizer.special_id(marker) for marker in markers}
    shown = {token_id: marker for marker, token_id in ids.items() if token_id is not None}
    tools = None
    if family is not None and uses is not None:
        names = frozenset(tool.name for tool in uses.tools)
        tools = ToolCallParser(family.form_for(uses), names, parallel=uses.parallel, special=frozenset(shown.values()))
    return AnswerText(
        IncrementalDetokenizer(tokenizer, generate.sampling.stop, min_tokens=generate.sampling.min_tokens, shown=shown),
        reasoning=None if form is None else ReasoningParser(form, opened=tail.rstrip().endswith(form.opening)),
        tools=tools,
        sent_chars=generate.sent_chars,
    )


class Answer:
    """One admitted request. Its stream, once, is `begin` and then `feed` of each of its `outputs` until it has `ended`,
    or `events`; `close` must be called at the end, however it ends. `text` has the tokens that another instance made;
    `resumed` is what of them was not streamed yet.
    """

    def __init__(
        self,
        inflight: InflightRequest,
        text: AnswerText,
        *,
        cancel: Callable[[EngineRequest], None],
        measure: RequestMeasure,
        resumed: Parsed = Parsed(),  # noqa: B008  (frozen)
    ) -> None:
        self._inflight = inflight
        self.outputs = inflight.outputs
        self.ended = False
        self._text = text
        self._cancel = cancel
        self._measure = measure
        self._resumed = resumed
        self._completion_tokens = len(inflight.request.generated)
        self._cached_tokens: int | None = None

    @property
    def request_id(self) -> str:
        return self._inflight.request.request_id

    def close(self) -> None:
        """Cancel the request, if it runs."""
        self._cancel(self._inflight.request)
        self._measure.ended("abort")

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Started, then a Token for each output, then Finished or Failed."""
        for event in self.begin():
            yield event
        while not self.ended:
            for event in self.feed(await self.outputs.get()):
                yield event

    def begin(self) -> list[StreamEvent]:
        """What precedes the first output."""
        events: list[StreamEvent] = [Started(prompt_tokens=len(self._inflight.request.prompt))]
        if self._resumed:
            events.append(_token(self._resumed))
        if self._text.stopped:
            events.append(self._stopped())
        return events

    def feed(self, output: EngineOutput | DataplaneError) -> list[StreamEvent]:
        """What follows from the next output."""
        if isinstance(output, DataplaneError):
            return [self.fail(output)]
        if output.error is not None:
            return [self.fail((BadRequestError if output.invalid else DataplaneError)(output.error))]
        events = self._token_events(output)
        if self._text.stopped:
            events.append(self._stopped())
        elif output.finish_reason is not None:
            events.append(self._finished(output.finish_reason))
        return events

    def fail(self, error: DataplaneError) -> Failed:
        """The end of an answer that goes no further."""
        self.ended = True
        self._measure.ended("error")
        return failed_event(error)

    def _stopped(self) -> Finished:
        """The end before the engine's own."""
        finished = self._finished("stop")
        self.close()
        return finished

    def _token_events(self, output: EngineOutput) -> list[StreamEvent]:
        """The new text; tokens after a stop string do not count. Reasoning and calls that were held back until the end
        are an event without tokens, which a reader holds until `Finished`: another node, given all tokens, would make
        it again.
        """
        if self._cached_tokens is None:  # later prefills, after a worker was lost, are none of the client's
            self._cached_tokens = output.cached_tokens
        new, count = self._text.feed_all(output.token_ids)
        token_ids = output.token_ids[:count]
        held_back = _NOTHING if output.finish_reason is None else self._text.finish()
        if held_back and not (held_back.reasoning or held_back.tool_calls):
            new, held_back = new + held_back, _NOTHING
        self._completion_tokens += count
        self._measure.made(count)
        logprobs = self._logprobs(token_ids, output.scores) if output.scores else ()
        events: list[StreamEvent] = [_token(new, token_ids, logprobs)] if new or token_ids else []
        if held_back:
            events.append(_token(held_back))
        return events

    def _logprobs(self, token_ids: Sequence[int], scores: Sequence[TokenScore]) -> tuple[TokenLogprob, ...]:
        return tuple(
            TokenLogprob(
                token=self._top(token_id, score.logprob), top=tuple(self._top(one, value) for one, value in score.top)
            )
            for token_id, score in zip(token_ids, scores, strict=False)
        )

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        """A token decoded by itself: of one that is part of a character, the text is a replacement character."""
        utf8 = self._text.token_bytes(token_id)
        text = utf8.decode("utf-8", errors="replace")
        return TopLogprob(token_id=token_id, text=text, utf8=tuple(utf8), logprob=logprob)

    def _finished(self, reason: FinishReason) -> Finished:
        self.ended = True
        reason = self._text.finish_reason(reason)
        self._measure.ended(reason)
        return Finished(
            finish_reason=reason,
            prompt_tokens=len(self._inflight.request.prompt),
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens or 0,
            reasoning_tokens=self._text.reasoning_tokens,
        )


def _token(new: Parsed, token_ids: tuple[int, ...] = (), logprobs: tuple[TokenLogprob, ...] = ()) -> Token:
    return Token(
        text=new.content,
        token_ids=token_ids,
        reasoning=new.reasoning,
        tool_calls=new.tool_calls,
        logprobs=logprobs,
    )
