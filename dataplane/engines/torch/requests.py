"""The requests of a slot from `add` to their last output: queued, among a model's sequences, or handed over."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from dataplane.engine import EngineOutput, EngineRequest
from dataplane.engines.torch.kv import KvStore, Place, SequenceKv
from dataplane.engines.torch.pooled import Pooled
from dataplane.engines.torch.sequences import TokenSequence
from dataplane.errors import BadRequestError, ContextLengthError
from dataplane.turns.prefill import PrefillQueue, PrefillSettings


class Requests:
    """All of them. `models` are the slot's, by name; who loads and unloads them changes it."""

    def __init__(
        self, models: Mapping[str, Pooled], kv: KvStore, settings: PrefillSettings, clock: Callable[[], float]
    ) -> None:
        self.prefills = PrefillQueue()
        self._models = models
        self._kv = kv
        self._settings = settings
        self._clock = clock
        self._sequences: dict[str, TokenSequence] = {}
        self._handed_over: dict[str, SequenceKv] = {}
        self._ended: dict[str, EngineOutput] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        """Requests running or waiting, and ends still to be told."""
        return len(self._sequences) + len(self._ended)

    def __iter__(self) -> Iterator[TokenSequence]:
        """Those that run or wait."""
        return iter(self._sequences.values())

    @property
    def handed_over(self) -> list[SequenceKv]:
        """KV that waits for another slot to read it."""
        return list(self._handed_over.values())

    def find(self, request_ids: Iterable[str]) -> list[TokenSequence]:
        """Requests by their ids, in that order."""
        return [self._sequences[request_id] for request_id in request_ids]

    def waiting_of(self, model: str) -> bool:
        """Whether requests of a model wait for their prefill."""
        return any(group.model == model for group in self.prefills.groups)

    def add(self, request: EngineRequest, pooled: Pooled, *, capacity_tokens: int) -> None:
        """Queue a request, or let it decode at once where its KV can be read.

        Raises:
            ContextLengthError: prompt + max_tokens exceed the context or `capacity_tokens`.
            BadRequestError: an id in use, an empty prompt, or a token the model does not know.
        """
        if request.request_id in self._sequences or request.request_id in self._ended:
            raise BadRequestError(f"request id {request.request_id} is in use", param="request_id")
        _check_fits(request, pooled, capacity_tokens)
        if len(request.generated) >= request.max_tokens:
            self._ended[request.request_id] = EngineOutput(request_id=request.request_id, finish_reason="length")
            return
        self._arrivals += 1
        sequence = TokenSequence(
            request=request,
            model=pooled.name,
            order=self._arrivals,
            added_s=self._clock(),
            kv=SequenceKv(shape=pooled.shape),
        )
        self._sequences[request.request_id] = sequence
        handle = request.kv
        if handle is not None and handle.tokens == sequence.pending - 1 and self._kv.adopt(sequence.kv, handle):
            sequence.cached = handle.tokens
            pooled.sequences.append(sequence)
        else:
            self.queue(sequence)

    def queue(self, sequence: TokenSequence) -> None:
        """Let it wait for its prefill, from its first token on."""
        sequence.cached = 0
        pooled = self._models[sequence.model]
        if sequence in pooled.sequences:
            pooled.sequences.remove(sequence)
        self.prefills = self.prefills.join(sequence.to_prefill(), self._settings)

    def requeue_lost(self) -> None:
        """Queue again what lost its KV because its transfer failed too often."""
        for sequence in [s for s in self if s.cached and s.kv.place is Place.NOWHERE]:
            self.queue(sequence)

    def take(self, sequence: TokenSequence, token: int | None, pooled: Pooled) -> EngineOutput:
        """Append a chosen token to its sequence, and end the sequence where it ends."""
        request_id = sequence.request.request_id
        self.prefills = self.prefills.remove(request_id)
        if token is None or token in pooled.model.skeleton.eos_ids:
            self.forget(request_id)
            if token is None:
                return EngineOutput(request_id=request_id, error=f"{pooled.name}: logits are not numbers")
            return EngineOutput(request_id=request_id, finish_reason="stop")
        sequence.tokens.append(token)
        if sequence.generated < sequence.request.max_tokens:
            return EngineOutput(request_id=request_id, token_ids=(token,))
        self.forget(request_id)
        return EngineOutput(request_id=request_id, token_ids=(token,), finish_reason="length")

    def hand_over(self) -> None:
        """Send the KV of requests past their prefill to host memory, and let those go whose KV is there."""
        for pooled in self._models.values():
            for sequence in pooled.decoding():
                if sequence.kv.place is Place.HERE:
                    self._kv.swap_out(sequence.kv, sequence.cached)
                elif sequence.kv.place is Place.AWAY:
                    request_id = sequence.request.request_id
                    handle = self._kv.handle(sequence.kv, sequence.cached)
                    self._ended[request_id] = EngineOutput(request_id=request_id, kv=handle)
                    self._handed_over[request_id] = sequence.kv
                    pooled.sequences.remove(sequence)
                    del self._sequences[request_id]

    def release(self, request_id: str) -> None:
        """Free the KV of a request that was handed over, if there is such."""
        kv = self._handed_over.pop(request_id, None)
        if kv is not None:
            self._kv.drop(kv)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free what it holds; nothing more is heard of it."""
        self._ended.pop(request_id, None)
        self.forget(request_id)
        self.release(request_id)

    def forget(self, request_id: str) -> None:
        """Take a request out and free its KV."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        self.prefills = self.prefills.remove(request_id)
        pooled = self._models[sequence.model]
        if sequence in pooled.sequences:
            pooled.sequences.remove(sequence)
        self._kv.drop(sequence.kv)

    def end_all(self, sequences: Iterable[TokenSequence], error: str) -> None:
        """End requests with an error."""
        for sequence in list(sequences):
            request_id = sequence.request.request_id
            self.forget(request_id)
            self._ended[request_id] = EngineOutput(request_id=request_id, error=error)

    def tell_ended(self) -> list[EngineOutput]:
        """Last outputs that did not come out of a step."""
        outputs = list(self._ended.values())
        self._ended.clear()
        return outputs


def _check_fits(request: EngineRequest, pooled: Pooled, capacity_tokens: int) -> None:
    if not request.prompt:
        raise BadRequestError("the prompt is empty", param="prompt")
    if request.max_tokens < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens")
    vocabulary = pooled.model.skeleton.geometry.vocabulary
    unknown = next((token for token in (*request.prompt, *request.generated) if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise BadRequestError(f"token {unknown} is outside of the vocabulary of {vocabulary}", param="prompt")
    wanted = len(request.prompt) + request.max_tokens
    for what, limit in (("context", pooled.context_tokens), ("KV cache", capacity_tokens)):
        if wanted > limit:
            asked = f"{len(request.prompt)} prompt tokens and max_tokens={request.max_tokens}"
            raise ContextLengthError(f"{asked} exceed the {what} of {limit} tokens", param="max_tokens")
