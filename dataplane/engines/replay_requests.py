"""The replay engine's requests: how they begin, make tokens, lose their KV and are handed over."""

from collections.abc import Callable, Mapping

from dataplane.engine import EngineOutput, EngineRequest, KvHandle
from dataplane.engines.preemption import Place
from dataplane.engines.replay_memory import KvMemory, SequenceKv
from dataplane.engines.replay_models import ReplayModel, ReplaySequence, sampling_key
from dataplane.engines.replay_settings import ReplaySettings
from dataplane.engines.request_table import RequestTable
from dataplane.errors import BadRequestError, ContextLengthError
from dataplane.messages import ModelSpec

REPLAY_KV_FILE = ""
"""The file of a handle to replayed KV. It can always be read: there is nothing in it."""


class ReplayRequests(RequestTable[ReplaySequence, SequenceKv]):
    """All of them. `models` are the slot's, by name; who loads and unloads them changes it."""

    def __init__(
        self,
        settings: ReplaySettings,
        models: Mapping[str, ReplayModel],
        kv: KvMemory,
        clock: Callable[[], float],
    ) -> None:
        super().__init__()
        self._settings = settings
        self._models = models
        self._kv = kv
        self._clock = clock

    def kv_of(self, sequence: ReplaySequence) -> SequenceKv:
        """See `RequestTable`."""
        return sequence.kv

    def drop_kv(self, kv: SequenceKv) -> None:
        """See `RequestTable`."""
        self._kv.drop(kv)

    def leave_model(self, sequence: ReplaySequence) -> None:
        """See `RequestTable`."""
        self._models[sequence.model].end_decoding(sequence)

    def add(self, request: EngineRequest, model: ReplayModel) -> None:
        """Queue a request, or let it decode at once where its KV can be read.

        Raises:
            dataplane.errors.ContextLengthError: it fits neither the context nor, alone, the slot's KV memory.
            dataplane.errors.BadRequestError: the prompt is empty or the id is in use.
        """
        _check_fits(request, model.spec, self._settings.kv_bytes)
        if self.is_over(request):
            return
        sequence = ReplaySequence(
            request=request,
            model=model.spec.name,
            order=self.next_order(),
            added_s=self._clock(),
            sampling_key=sampling_key(model.spec.name, request),
            kv=SequenceKv(bytes_per_token=model.spec.kv_bytes_per_token, bytes_per_s=model.bytes_per_s),
            generated=len(request.generated),
        )
        self._sequences[request.request_id] = sequence
        handle = request.kv
        if handle is not None and handle.file == REPLAY_KV_FILE and handle.tokens == sequence.tokens - 1:
            self._kv.adopt(sequence.kv, handle.tokens)
            sequence.cached = handle.tokens
            model.begin_decoding(sequence)
        else:
            self.queue(sequence)

    def queue(self, sequence: ReplaySequence) -> None:
        """Let a sequence wait for its prefill, from its first token on."""
        self._kv.drop(sequence.kv)
        sequence.cached = 0
        self.leave_model(sequence)
        self.prefills = self.prefills.join(sequence.to_prefill(), self._settings.turns.prefill)

    def take_token(self, sequence: ReplaySequence) -> EngineOutput:
        """Make the next token of a sequence, and end it where it ends."""
        output = sequence.make_token(self._settings.vocabulary_size, self._settings.mean_tokens)
        if output.finish_reason is not None:
            self.forget(output.request_id)
        elif sequence not in self._models[sequence.model].decoding:
            self.prefills = self.prefills.remove(output.request_id)
            self._models[sequence.model].begin_decoding(sequence)
        return output

    def hand_over(self, now_s: float) -> None:
        """Send the KV of requests past their prefill to host memory, and let those go whose KV is there."""
        for model in self._models.values():
            for sequence in model.decoding.copy():
                if sequence.kv.place is Place.HERE:
                    self._kv.swap_out(sequence.kv, sequence.cached, now_s)
                elif sequence.kv.place is Place.AWAY:
                    self.let_go(sequence, _handle(sequence))


def _handle(sequence: ReplaySequence) -> KvHandle:
    return KvHandle(file=REPLAY_KV_FILE, slab_bytes=0, shape=(0, 0, 0, 0, 0), blocks=(), tokens=sequence.cached)


def _check_fits(request: EngineRequest, spec: ModelSpec, kv_bytes: int) -> None:
    if not request.prompt:
        raise BadRequestError("prompt must hold at least one token", param="prompt")
    tokens = len(request.prompt) + request.max_tokens
    tokens_max = min(spec.context_tokens, kv_bytes // spec.kv_bytes_per_token)
    if tokens > tokens_max:
        raise ContextLengthError(
            f"prompt of {len(request.prompt)} and max_tokens of {request.max_tokens} make {tokens} tokens; "
            f"{spec.name} takes at most {tokens_max} here",
            param="max_tokens",
        )
