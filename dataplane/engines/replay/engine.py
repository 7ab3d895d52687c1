"""An engine without weights: deterministic tokens, with the timing of a GPU profile. For load tests and large demos.

Scheduling, switches, prefetching, swapping, preemption and remapping are those of the torch engine; only the arithmetic
of a forward pass and the copying of bytes are replaced by waiting. Of the parameters of sampling, only `seed`,
`temperature` (0 or not), `ignore_eos`, `min_tokens` and `logprobs` have an effect; all others are accepted.
"""

from collections.abc import Callable, Iterable

from dataplane.engines.core.kv import DEVICE
from dataplane.engines.core.pressure import Shortage
from dataplane.engines.core.pressure_handler import KvPressureHandler
from dataplane.engines.core.remapping.actions import Action
from dataplane.engines.core.slot_engine import Made, SlotEngine
from dataplane.engines.interface import PoolStats, TokenScore
from dataplane.engines.replay.kv import ReplayKvMemory, SequenceKv
from dataplane.engines.replay.models import Answers, ReplayModel, ReplaySequence, pooled_values, replayed
from dataplane.engines.replay.report import memory_stats
from dataplane.engines.replay.settings import ReplaySettings
from dataplane.engines.replay.slot_memory import ReplaySlotMemory
from dataplane.engines.replay.steps import ReplaySteps
from dataplane.engines.replay.weights import WeightsMemory
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import ModelSpec
from dataplane.scheduling.schedule import Turn

__all__ = ["ReplayEngine", "ReplaySettings"]


class ReplayEngine(SlotEngine[ReplayModel, SequenceKv]):
    """Meets `dataplane.engines.interface.Engine`. A step waits, through `sleep`, until its profiled time is over."""

    def __init__(self, settings: ReplaySettings, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._settings = settings
        self.weights = WeightsMemory(settings.weights_bytes)
        self._adapters: dict[str, int] = {}
        """The bytes of those that are loaded, by name."""
        self.kv = ReplayKvMemory(
            settings.kv_bytes,
            settings.host_kv_bytes,
            clock,
            self.weights,
            prefix_cache=settings.prefix_cache,
            announces=settings.kv_events != "off",
        )
        super().__init__(
            settings,
            clock,
            self.kv,
            reclaim=lambda _: False,  # weights never borrow KV memory
            on_shortage=self._on_shortage,
        )
        self._slot_memory = ReplaySlotMemory(settings, self.models, self.weights, self.kv, clock)
        self.pressure = KvPressureHandler(settings, self, self._slot_memory, self.kv, clock, load_s=self._switch_s)
        self._steps = ReplaySteps(
            settings,
            self.models,
            self.weights,
            self.kv,
            self._step_batches,
            clock=clock,
            sleep=sleep,
            evict_kv=self._evict_kv_for,
        )
        self._answers = Answers(settings.vocabulary_size, settings.mean_tokens)

    def prepare(self, model: ModelSpec) -> None:
        """Check that the model fits. Nothing is read: it need not exist.

        Raises:
            ModelLoadError: weights or one token of KV do not fit.
        """
        limits = (
            ("weights_bytes", model.checkpoint.weights_bytes, self._settings.weights_bytes),
            ("kv_bytes_per_token", model.kv_bytes_per_token, self._settings.kv_bytes),
        )
        for name, value, limit in limits:
            if not 0 < value <= limit:
                raise ModelLoadError(f"{name} of {model.name} is {value}; it must be 1 to {limit} here", param=name)
        if model.base is not None:
            self._check_adapter(model)

    def _check_adapter(self, spec: ModelSpec) -> None:
        limit = self._settings.adapters_bytes - sum(self._adapters.values()) + self._adapters.get(spec.name, 0)
        if not 0 < spec.weights_bytes <= limit:
            left = f"{limit} are left of adapters_bytes={self._settings.adapters_bytes}"
            raise ModelLoadError(f"weights_bytes of {spec.name} is {spec.weights_bytes}; {left}", param="weights_bytes")

    def _new_model(self, spec: ModelSpec, gpus: int) -> ReplayModel:
        self._slot_memory.lend_place(None)  # the new model may be the largest
        return replayed(ReplayModel, spec, self._settings, gpus)

    def _begin_slice(self) -> None:
        self.pressure.begin_slice()

    def _forget_model(self, model: ReplayModel) -> None:
        self.weights.evict(model.name)

    def _load_adapter(self, model: ReplayModel, spec: ModelSpec) -> None:
        self._check_adapter(spec)
        self._adapters[spec.name] = spec.weights_bytes

    def _unload_adapter(self, model: ReplayModel, name: str) -> None:
        del self._adapters[name]

    def _settle(self) -> None:
        self.kv.settle()
        for name in self.pressure.revert() if self.weights.offloaded_bytes else ():
            self._evict_kv(self.models[name].weights.layer_bytes - self.kv.spare_bytes)

    def _on_shortage(self, shortage: Shortage) -> Action | None:
        return self.pressure.on_shortage(shortage)

    def _evict_kv_for(self, model: ReplayModel) -> None:
        """Evict KV from layers that a model to run needs; first all models, so that no other KV uses the layers."""
        self.weights.evict_all()
        self._evict_kv(self.kv.out_of_region_bytes - (self.weights.capacity_bytes - model.weights_bytes))

    def _evict_kv(self, size_bytes: int) -> None:
        """Evict so much KV, last in the order of service first; none while a transfer frees memory."""
        if self.kv.freeing:
            return
        here = [s for model in self.models.values() for s in model.begun if s.kv.location is DEVICE]
        evicted = set()
        for sequence in sorted(here, key=lambda sequence: sequence.key, reverse=True):
            if size_bytes <= 0:
                break
            evicted.add(sequence.kv)
            size_bytes -= sequence.kv.device_bytes
        self._allocator.evict(lambda kv: kv in evicted)

    def _fit_together(self, models: Iterable[ReplayModel]) -> bool:
        out_of_region_bytes = self.kv.out_of_region_bytes
        return self.weights.fit([model.weights for model in models], out_of_region_bytes=out_of_region_bytes)

    def _switch_s(self, model: ReplayModel) -> float:
        return model.weights.switch_s

    def _missing_s(self, model: ReplayModel, now_s: float) -> float:
        return self.weights.missing_s(model.weights, now_s)

    def _is_ready(self, model: ReplayModel) -> bool:
        return True  # weights are always in host memory

    def _run(self, turn: Turn, model: ReplayModel, now_s: float) -> Made[SequenceKv] | None:
        makers = self._steps.run(turn, model, self.requests.find(turn.group), now_s)
        if makers is None:
            return None
        return self._without_unmatched([(sequence, *self._answered(sequence, model)) for sequence in makers])

    def _answered(self, sequence: ReplaySequence, model: ReplayModel) -> tuple[int | None, TokenScore | None]:
        """The next token and its score, if that is wanted; with `pooling` neither, and the sequence has its values."""
        if sequence.request.pooling:
            sequence.values = pooled_values(sequence, model.task)
            return None, None
        token, wanted = self._answers.next_token(sequence), sequence.request.logprobs
        return token, None if wanted is None or token is None else self._answers.score(sequence, token, wanted)

    def _wait(self, now_s: float) -> None:
        if self.requests:
            self._steps.wait(now_s)

    def _kv_tokens_max(self, model: ReplayModel) -> int:
        return self._settings.request_kv_bytes // model.kv_bytes_per_token

    def _kv_free_bytes(self, model: ReplayModel) -> int:
        return self.kv.free_bytes

    def _resident_models(self, now_s: float) -> tuple[str, ...]:
        return self.weights.resident_models(now_s)

    def _memory_stats(self, now_s: float) -> PoolStats:
        return self.pressure.counted(memory_stats(now_s, self.weights, self.kv, self.requests.all_kv))
