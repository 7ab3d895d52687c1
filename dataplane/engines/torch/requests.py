"""The torch engine's requests: how they begin, take tokens, lose their KV and are handed over."""

from collections.abc import Callable, Mapping

from dataplane.engine import EngineOutput, EngineRequest
from dataplane.engines.preemption import Place
from dataplane.engines.request_table import RequestTable
from dataplane.engines.torch.kv import KvStore, SequenceKv
from dataplane.engines.torch.pooled import Pooled
from dataplane.engines.torch.sequences import TokenSequence
from dataplane.errors import BadRequestError, ContextLengthError
from dataplane.turns.prefill import PrefillSettings


class Requests(RequestTable[TokenSequence, SequenceKv]):
    """All of them. `models` are the slot's, by name; who loads and unloads them changes it."""

    def __init__(
        self, models: Mapping[str, Pooled], kv: KvStore, settings: PrefillSettings, clock: Callable[[], float]
    ) -> None:
        super().__init__()
        self._models = models
        self._kv = kv
        self._settings = settings
        self._clock = clock

    def kv_of(self, sequence: TokenSequence) -> SequenceKv:
        """See `RequestTable`."""
        return sequence.kv

    def drop_kv(self, kv: SequenceKv) -> None:
        """See `RequestTable`."""
        self._kv.drop(kv)

    def leave_model(self, sequence: TokenSequence) -> None:
        """See `RequestTable`."""
        begun = self._models[sequence.model].sequences
        if sequence in begun:
            begun.remove(sequence)

    def add(self, request: EngineRequest, pooled: Pooled, *, capacity_tokens: int) -> None:
        """Queue a request, or let it decode at once where its KV can be read.

        Raises:
            ContextLengthError: prompt + max_tokens exceed the context or `capacity_tokens`.
            BadRequestError: an id in use, an empty prompt, or a token the model does not know.
        """
        _check_fits(request, pooled, capacity_tokens)
        if self.is_over(request):
            return
        sequence = TokenSequence(
            request=request,
            model=pooled.name,
            order=self.next_order(),
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
        self.leave_model(sequence)
        waiting = self.prefills.remove(sequence.request.request_id)  # in the midst of its prefill it is still there
        self.prefills = waiting.join(sequence.to_prefill(), self._settings)

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
                    self.let_go(sequence, self._kv.handle(sequence.kv, sequence.cached))


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
