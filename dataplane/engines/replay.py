"""An engine without weights: deterministic tokens, with the timing of a GPU profile. For load tests and large demos.

Turns, switches, prefetching, swapping and preemption are those of the torch engine; only the arithmetic of a forward
pass and the copying of bytes are replaced by waiting.
"""

from collections.abc import Callable, Iterable

from dataplane.engine import PoolStats
from dataplane.engines.replay_memory import ReplayKvMemory, SequenceKv, WeightsMemory
from dataplane.engines.replay_models import Answers, ReplayModel, replayed
from dataplane.engines.replay_report import pool_stats
from dataplane.engines.replay_settings import ReplaySettings
from dataplane.engines.replay_steps import ReplaySteps
from dataplane.engines.slot_engine import Made, SlotEngine
from dataplane.errors import ModelLoadError
from dataplane.messages import ModelSpec
from dataplane.turns.schedule import Turn

__all__ = ["ReplayEngine", "ReplaySettings"]


class ReplayEngine(SlotEngine[ReplayModel, SequenceKv]):
    """Meets `dataplane.engine.Engine`. A step waits, through `sleep`, until its profiled time is over."""

    def __init__(self, settings: ReplaySettings, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._settings = settings
        self._weights = WeightsMemory(settings.weights_bytes)
        self._kv = ReplayKvMemory(settings.kv_bytes, settings.host_kv_bytes, clock)
        super().__init__(settings, clock, self._kv, take_back=lambda _: False)  # weights have memory of their own
        self._steps = ReplaySteps(
            settings, self._models, self._weights, self._kv, self._step_batches, clock=clock, sleep=sleep
        )
        self._answers = Answers(settings.vocabulary_size, settings.mean_tokens)

    def prepare(self, model: ModelSpec) -> None:
        """Check that the model fits. Nothing is read: it need not exist.

        Raises:
            ModelLoadError: weights or one token of KV do not fit.
        """
        limits = (
            ("weights_bytes", model.weights_bytes, self._settings.weights_bytes),
            ("kv_bytes_per_token", model.kv_bytes_per_token, self._settings.kv_bytes),
        )
        for name, value, limit in limits:
            if not 0 < value <= limit:
                raise ModelLoadError(f"{name} of {model.name} is {value}; it must be 1 to {limit} here", param=name)

    def _new_model(self, spec: ModelSpec, gpus: int) -> ReplayModel:
        return replayed(ReplayModel, spec, self._settings.profile, gpus, self._settings.speed)

    def _forget_model(self, model: ReplayModel) -> None:
        self._weights.evict(model.name)

    def _settle(self) -> None:
        self._kv.settle()

    def _fit_together(self, models: Iterable[ReplayModel]) -> bool:
        return self._weights.fit(model.weights for model in models)

    def _switch_s(self, model: ReplayModel) -> float:
        return model.weights.switch_s

    def _missing_s(self, model: ReplayModel, now_s: float) -> float:
        return self._weights.missing_s(model.weights, now_s)

    def _is_ready(self, model: ReplayModel) -> bool:
        return True  # weights are always in host memory

    def _run(self, turn: Turn, model: ReplayModel, now_s: float) -> Made[SequenceKv] | None:
        makers = self._steps.run(turn, model, self._requests.find(turn.group), now_s)
        return None if makers is None else [(sequence, self._answers.next_token(sequence)) for sequence in makers]

    def _wait(self, now_s: float) -> None:
        if self._requests:
            self._steps.wait(now_s)

    def _kv_tokens_max(self, model: ReplayModel) -> int:
        return self._settings.kv_bytes // model.kv_bytes_per_token

    def _kv_free_bytes(self, model: ReplayModel) -> int:
        return self._kv.free_bytes

    def _resident_models(self, now_s: float) -> tuple[str, ...]:
        return self._weights.resident_models(now_s)

    def _pool_stats(self, now_s: float) -> PoolStats:
        return pool_stats(
            now_s=now_s,
            turn=self._state.turn,
            load=self.load_alpha,
            weights=self._weights,
            kv=self._kv,
            requests=self._requests,
            log=self._log,
        )
