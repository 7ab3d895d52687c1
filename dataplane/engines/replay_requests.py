"""The requests of a replayed slot from `add` to their last output: queued, decoding, or handed over."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from dataplane.engine import EngineOutput, EngineRequest, KvHandle
from dataplane.engines.replay_memory import KvMemory, Place, SequenceKv
from dataplane.engines.replay_models import ReplayModel, ReplaySequence, sampling_key
from dataplane.engines.replay_settings import ReplaySettings
from dataplane.errors import BadRequestError, ContextLengthError
from dataplane.messages import ModelSpec
from dataplane.turns.prefill import PrefillQueue

REPLAY_KV_FILE = ""
"""The file of a handle to replayed KV. It can always be read: there is nothing in it."""


class ReplayRequests:
    """All of them. `models` are the slot's, by name; who loads and unloads them changes it."""

    def __init__(
        self,
        settings: ReplaySettings,
        models: Mapping[str, ReplayModel],
        kv: KvMemory,
        clock: Callable[[], float],
    ) -> None:
        self.prefills = PrefillQueue()
        self._settings = settings
        self._models = models
        self._kv = kv
        self._clock = clock
        self._sequences: dict[str, ReplaySequence] = {}
        self._handed_over: dict[str, SequenceKv] = {}
        self._ended: dict[str, EngineOutput] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        """Requests running or waiting, and ends still to be told."""
        return len(self._sequences) + len(self._ended)

    def __iter__(self) -> Iterator[ReplaySequence]:
        """Those that run or wait."""
        return iter(self._sequences.values())

    @property
    def all_kv(self) -> list[SequenceKv]:
        """Of those that run or wait, and of those that were handed over and not released."""
        return [sequence.kv for sequence in self] + list(self._handed_over.values())

    def find(self, request_ids: Iterable[str]) -> list[ReplaySequence]:
        """Requests by their ids, in that order."""
        return [self._sequences[request_id] for request_id in request_ids]

    def of_instance(self, instance_id: str) -> list[ReplaySequence]:
        """Those of one instance that run or wait."""
        return [sequence for sequence in self if sequence.request.instance_id == instance_id]

    def add(self, request: EngineRequest, model: ReplayModel) -> None:
        """Queue a request, or let it decode at once where its KV can be read.

        Raises:
            dataplane.errors.ContextLengthError: it fits neither the context nor, alone, the slot's KV memory.
            dataplane.errors.BadRequestError: the prompt is empty or the id is in use.
        """
        if request.request_id in self._sequences or request.request_id in self._ended:
            raise BadRequestError(f"request {request.request_id} is running already", param="request_id")
        _check_fits(request, model.spec, self._settings.kv_bytes)
        if len(request.generated) >= request.max_tokens:
            self._ended[request.request_id] = EngineOutput(request_id=request.request_id, finish_reason="length")
            return
        self._arrivals += 1
        sequence = ReplaySequence(
            request=request,
            model=model.spec.name,
            order=self._arrivals,
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
        self._models[sequence.model].end_decoding(sequence)
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
                    request_id = sequence.request.request_id
                    self._ended[request_id] = EngineOutput(request_id=request_id, kv=_handle(sequence))
                    self._handed_over[request_id] = sequence.kv
                    model.end_decoding(sequence)
                    del self._sequences[request_id]

    def release(self, request_id: str) -> None:
        """Free the KV of a request that was handed over. Unknown ids are ignored."""
        kv = self._handed_over.pop(request_id, None)
        if kv is not None:
            self._kv.drop(kv)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free what it holds; nothing more is heard of it."""
        self._ended.pop(request_id, None)
        self.forget(request_id)
        self.release(request_id)

    def forget(self, request_id: str) -> None:
        """Take a request out and free its KV. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.prefills = self.prefills.remove(request_id)
            self._models[sequence.model].end_decoding(sequence)
            self._kv.drop(sequence.kv)

    def end_instance(self, instance_id: str) -> None:
        """End all requests of an instance that goes."""
        for sequence in self.of_instance(instance_id):
            request_id = sequence.request.request_id
            self.forget(request_id)
            self._ended[request_id] = EngineOutput(request_id=request_id, error=f"instance {instance_id} was unloaded")

    def tell_ended(self) -> list[EngineOutput]:
        """Last outputs that come out of no step."""
        outputs = list(self._ended.values())
        self._ended.clear()
        return outputs


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
