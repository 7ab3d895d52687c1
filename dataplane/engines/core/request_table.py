"""The requests of a slot from `add` to their last output, the same for every engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Generic

from dataplane.engines.core.kv import DEVICE, NONE, KvMemory, KvT
from dataplane.engines.core.sequences import TokenSequence
from dataplane.engines.core.served_models import ServedModel
from dataplane.engines.interface import EngineOutput, EngineRequest, TokenScore
from dataplane.protocol.errors import BadRequestError, ContextLengthError
from dataplane.scheduling.prefill import PrefillQueue, PrefillSettings

_LOAD_ORDER = attrgetter("load_order")


class RequestTable(Generic[KvT]):
    """Running and waiting requests, exported ones whose KV is still to be read, and last outputs that are still to be
    returned. `models` are the slot's, by name; the caller that loads and unloads models changes it.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel[KvT]],
        kv: KvMemory[KvT],
        settings: PrefillSettings,
        clock: Callable[[], float],
    ) -> None:
        self.prefills = PrefillQueue()
        self._models = models
        self._kv = kv
        self._settings = settings
        self._clock = clock
        self._sequences: dict[str, TokenSequence[KvT]] = {}
        self._exported: dict[str, KvT] = {}
        self._ended: dict[str, EngineOutput] = {}
        self._arrivals = 0
        self._begun: dict[str, ServedModel[KvT]] = {}
        """Models with requests that have KV."""
        self._busy: list[ServedModel[KvT]] = []
        self._busy_prefills: PrefillQueue | None = None
        """The queue from which `_busy` was made; None: other models have KV since."""

    def __len__(self) -> int:
        """Running and waiting requests, and last outputs still to be returned."""
        return len(self._sequences) + len(self._ended)

    def __iter__(self) -> Iterator[TokenSequence[KvT]]:
        """Running and waiting requests."""
        return iter(self._sequences.values())

    @property
    def all_kv(self) -> list[KvT]:
        """The KV of running and waiting requests, and of exported ones that were not released."""
        return [*(sequence.kv for sequence in self), *self._exported.values()]

    @property
    def exported(self) -> Mapping[str, KvT]:
        """The KV of exported requests that were not released, by id."""
        return self._exported

    @property
    def waiting_models(self) -> frozenset[str]:
        return frozenset([group.model for group in self.prefills.groups])

    @property
    def busy_models(self) -> Sequence[ServedModel[KvT]]:
        """Models with requests that wait for their prefill or have KV, in the order of loading."""
        if self._busy_prefills is not self.prefills:
            busy = self._begun | {group.model: self._models[group.model] for group in self.prefills.groups}
            self._busy = sorted(busy.values(), key=_LOAD_ORDER)
            self._busy_prefills = self.prefills
        return self._busy

    def next_prefills_s(self, prefills: PrefillQueue) -> dict[str, float]:
        """By model, the estimated prefill time of the next request of its front group in a queue."""
        if not prefills.groups:
            return {}
        first = {group.model: group.waiting[0].tokens for group in reversed(prefills.groups)}
        return {name: self._models[name].estimate.prefill_s(tokens, tokens**2) for name, tokens in first.items()}

    def find(self, request_ids: Iterable[str]) -> list[TokenSequence[KvT]]:
        return [self._sequences[request_id] for request_id in request_ids]

    def of_instance(self, instance_id: str) -> list[TokenSequence[KvT]]:
        return [sequence for sequence in self if sequence.request.instance_id == instance_id]

    def add(self, request: EngineRequest, model: ServedModel[KvT], *, kv_tokens_max: int) -> None:
        """Queue a request, or let it decode at once if its KV can be read.

        Raises:
            BadRequestError: an id in use, also by exported KV that was not released; an empty prompt, max_tokens below
                1 where tokens are made, a token outside of the vocabulary, an answer that is not of the model's task,
                or a constraint that cannot be compiled.
            ContextLengthError: prompt + max_tokens exceed the context or `kv_tokens_max`.
        """
        request_id = request.request_id
        if any(request_id in used for used in (self._sequences, self._ended, self._exported)):
            raise BadRequestError(f"request id {request_id} is in use", param="request_id")
        _check(request, model, kv_tokens_max)
        matcher = model.matcher(request)
        if not request.pooling and len(request.generated) >= request.max_tokens:
            self._ended[request_id] = EngineOutput(request_id=request_id, finish_reason="length")
            return
        self._arrivals += 1
        adapter = model.instances.get(request.instance_id, "")
        sequence = TokenSequence(
            request=request,
            model=model.name,
            order=self._arrivals,
            added_s=self._clock(),
            adapter=adapter,
            kv=model.new_kv(adapter),
            matcher=matcher,
        )
        self._sequences[request_id] = sequence
        if not request.pooling:  # a pooled answer needs the states of all tokens
            self._kv.track(sequence.kv, sequence.tokens, request.cache_salt)
        handle = request.kv
        if handle is not None and handle.tokens == sequence.pending - 1 and self._kv.adopt(sequence.kv, handle):
            sequence.cached, sequence.prefilled = handle.tokens, True
            self.begin(sequence)
        else:
            self._join(sequence)

    def begin(self, sequence: TokenSequence[KvT]) -> None:
        """Record that a sequence has KV. Idempotent."""
        if not sequence.begun:
            model = self._models[sequence.model]
            model.begin(sequence)
            if len(model.begun) == 1:
                self._begun[model.name] = model
                self._busy_prefills = None

    def _leave(self, sequence: TokenSequence[KvT]) -> None:
        """Record that it has none any more."""
        if sequence.begun:
            model = self._models[sequence.model]
            model.leave(sequence)
            if not model.begun:
                del self._begun[model.name]
                self._busy_prefills = None

    def queue(self, sequence: TokenSequence[KvT]) -> None:
        """Drop a sequence's KV and queue it for a prefill from its first token on."""
        self._kv.drop(sequence.kv)
        self._leave(sequence)
        if not sequence.prefilled:  # a partly prefilled one is still in the queue
            self.prefills = self.prefills.remove(sequence.request.request_id)
        sequence.cached, sequence.reused, sequence.prefilled = 0, 0, False
        self._join(sequence)

    def _join(self, sequence: TokenSequence[KvT]) -> None:
        """Queue a sequence without KV."""
        self.prefills = self.prefills.join(sequence.to_prefill(), self._settings)

    def queue_lost(self) -> None:
        """Queue sequences whose KV was lost because its transfer failed too often."""
        begun = (sequence for model in self._begun.values() for sequence in model.begun)
        for sequence in [sequence for sequence in begun if sequence.kv.location is NONE]:
            self.queue(sequence)

    def take(self, sequence: TokenSequence[KvT], token: int | None, score: TokenScore | None = None) -> EngineOutput:
        """Append a new token to its sequence, and end that if it is complete. None: the end-of-sequence token. With
        `pooling` there is no token, and the request ends with its sequence's values.
        """
        request = sequence.request
        cached_tokens = min(sequence.reused, len(request.prompt)) if sequence.first else 0
        if not sequence.prefilled:
            self._models[sequence.model].end_prefill(sequence)
            self.prefills = self.prefills.remove(request.request_id)
        if request.pooling:
            self.forget(request.request_id)
            return EngineOutput(request_id=request.request_id, values=sequence.values, finish_reason="stop")
        lengths = self._models[sequence.model].lengths
        if token is None:
            lengths.note(sequence.generated)
            self.forget(request.request_id)
            return EngineOutput(request_id=request.request_id, cached_tokens=cached_tokens, finish_reason="stop")
        sequence.tokens.append(token)
        scores = () if score is None else (score,)
        if sequence.generated < request.max_tokens:
            return EngineOutput(
                request_id=request.request_id, token_ids=(token,), scores=scores, cached_tokens=cached_tokens
            )
        lengths.note(sequence.generated, cut=True)
        self.forget(request.request_id)
        return EngineOutput(
            request_id=request.request_id,
            token_ids=(token,),
            scores=scores,
            cached_tokens=cached_tokens,
            finish_reason="length",
        )

    def export_prefilled(self) -> None:
        """Transfer the KV of requests past their prefill to host memory, and export those that another slot can wait
        for, or whose transfer has ended.
        """
        for model in self.busy_models:
            for sequence in model.decoding:
                if sequence.kv.location is DEVICE:
                    self._kv.swap_out(sequence.kv, sequence.cached)
                if self._kv.can_export(sequence.kv):
                    self._export(sequence)

    def _export(self, sequence: TokenSequence[KvT]) -> None:
        """End a request here; its KV stays until `release`."""
        request_id = sequence.request.request_id
        self._ended[request_id] = EngineOutput(request_id=request_id, kv=self._kv.handle(sequence.kv, sequence.cached))
        self._exported[request_id] = sequence.kv
        self._leave(sequence)
        del self._sequences[request_id]

    def forget(self, request_id: str) -> None:
        """Remove a request and free its KV. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            if not sequence.prefilled:
                self.prefills = self.prefills.remove(request_id)
            self._leave(sequence)
            self._kv.drop(sequence.kv)

    def cancel(self, request_id: str) -> None:
        """Remove a request, exported or not, and its last output."""
        self._ended.pop(request_id, None)
        self.forget(request_id)
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """Free the KV of an exported request. Unknown ids are ignored."""
        kv = self._exported.pop(request_id, None)
        if kv is not None:
            self._kv.drop(kv)

    def end_all(self, sequences: Iterable[TokenSequence[KvT]], error: str, *, invalid: bool = False) -> None:
        for sequence in list(sequences):
            request_id = sequence.request.request_id
            self.forget(request_id)
            self._ended[request_id] = EngineOutput(request_id=request_id, error=error, invalid=invalid)

    def take_ended(self) -> list[EngineOutput]:
        """Last outputs that no step made: errors, exports, and requests that were complete when added."""
        if not self._ended:
            return []
        outputs = list(self._ended.values())
        self._ended.clear()
        return outputs


def _check(request: EngineRequest, model: ServedModel[KvT], kv_tokens_max: int) -> None:
    if not request.prompt:
        raise BadRequestError("prompt must hold at least one token", param="prompt")
    if request.pooling != (model.task != "generate"):
        answers = "it answers with pooled states" if request.pooling is False else "it generates tokens"
        raise BadRequestError(f"{model.name} cannot answer this request: {answers}", param="pooling")
    if not request.pooling and request.max_tokens < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens")
    if model.vocabulary is not None:
        tokens = (*request.prompt, *request.generated)
        unknown = next((token for token in tokens if not 0 <= token < model.vocabulary), None)
        if unknown is not None:
            raise BadRequestError(f"token {unknown} is outside of the vocabulary of {model.vocabulary}", param="prompt")
        unknown = next((token for token, _ in request.logit_bias if not 0 <= token < model.vocabulary), None)
        if unknown is not None:
            raise BadRequestError(
                f"token {unknown} is outside of the vocabulary of {model.vocabulary}", param="logit_bias"
            )
    limit = min(model.context_tokens, kv_tokens_max)
    if len(request.prompt) + request.answer_tokens_max > limit:
        what = "context" if limit == model.context_tokens else "KV cache"
        if request.pooling:
            raise ContextLengthError(
                f"{len(request.prompt)} prompt tokens exceed the {what} of {limit} tokens", param="prompt"
            )
        asked = f"{len(request.prompt)} prompt tokens and max_tokens={request.max_tokens}"
        raise ContextLengthError(f"{asked} exceed the {what} of {limit} tokens", param="max_tokens")
