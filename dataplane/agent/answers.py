"""From a Generate message to its stream of events."""

import secrets
from collections.abc import AsyncIterator, Callable, Sequence

from dataplane.agent.measures import RequestMeasure
from dataplane.agent.tokenization import IncrementalDetokenizer
from dataplane.dispatch.requests import InflightRequest
from dataplane.engines.interface import EngineOutput, EngineRequest, TokenScore
from dataplane.protocol.errors import ContextLengthError, DataplaneError
from dataplane.protocol.messages import (
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

RETRYABLE_STATUSES = frozenset({409, 429, 500, 503})
"""Refusals for reasons other than the request itself: another instance may take it."""


def failed_event(error: DataplaneError) -> Failed:
    """The error as a stream event."""
    return Failed(
        status=error.status,
        code=error.code,
        message=error.message,
        param=error.param,
        retryable=error.status in RETRYABLE_STATUSES,
    )


def engine_request(generate: Generate, prompt: tuple[int, ...], model: ModelSpec, *, tokens_max: int) -> EngineRequest:
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
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.seed is not None else secrets.randbits(31),
        ignore_eos=sampling.ignore_eos,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
        trace=current_parent(),
    )


class Answer:
    """One admitted request. `events` is its stream, once; `close` must be called at the end, however it ends.
    `detokenizer` has the tokens that another instance made; `resumed` is their text that was not streamed yet.
    """

    def __init__(
        self,
        inflight: InflightRequest,
        detokenizer: IncrementalDetokenizer,
        *,
        cancel: Callable[[EngineRequest], None],
        measure: RequestMeasure,
        resumed: str = "",
    ) -> None:
        self._inflight = inflight
        self._detokenizer = detokenizer
        self._cancel = cancel
        self._measure = measure
        self._resumed = resumed
        self._completion_tokens = len(inflight.request.generated)

    def close(self) -> None:
        """Cancel the request, if it runs."""
        self._cancel(self._inflight.request)
        self._measure.ended("abort")

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Started, then a Token for each output, then Finished or Failed."""
        yield Started(prompt_tokens=len(self._inflight.request.prompt))
        if self._resumed:
            yield Token(text=self._resumed)
        while True:
            if self._detokenizer.stopped:
                finished = self._finished("stop")
                self.close()
                yield finished
                return
            output = await self._inflight.outputs.get()
            if isinstance(output, DataplaneError):
                self._measure.ended("error")
                yield failed_event(output)
                return
            if output.error is not None:
                self._measure.ended("error")
                yield failed_event(DataplaneError(output.error))
                return
            event = self._token_event(output)
            if event is not None:
                yield event
            if output.finish_reason is not None and not self._detokenizer.stopped:
                yield self._finished(output.finish_reason)
                return

    def _token_event(self, output: EngineOutput) -> Token | None:
        """The new text. Tokens after a stop string do not count."""
        texts, token_ids = [], []
        for token_id in output.token_ids:
            texts.append(self._detokenizer.feed(token_id))
            token_ids.append(token_id)
            if self._detokenizer.stopped:
                break
        if output.finish_reason is not None:
            texts.append(self._detokenizer.finish())
        self._completion_tokens += len(token_ids)
        self._measure.made(len(token_ids))
        new = "".join(texts)
        if not new and not token_ids:
            return None
        logprobs = self._logprobs(token_ids, output.scores) if output.scores else ()
        return Token(text=new, token_ids=tuple(token_ids), logprobs=logprobs)

    def _logprobs(self, token_ids: Sequence[int], scores: Sequence[TokenScore]) -> tuple[TokenLogprob, ...]:
        return tuple(
            TokenLogprob(
                token=self._top(token_id, score.logprob), top=tuple(self._top(one, value) for one, value in score.top)
            )
            for token_id, score in zip(token_ids, scores, strict=False)
        )

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        """A token decoded by itself: of one that is part of a character, the text is a replacement character."""
        utf8 = self._detokenizer.token_bytes(token_id)
        text = utf8.decode("utf-8", errors="replace")
        return TopLogprob(token_id=token_id, text=text, utf8=tuple(utf8), logprob=logprob)

    def _finished(self, reason: FinishReason) -> Finished:
        self._measure.ended(reason)
        return Finished(
            finish_reason=reason,
            prompt_tokens=len(self._inflight.request.prompt),
            completion_tokens=self._completion_tokens,
        )
