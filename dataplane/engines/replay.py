"""An engine without weights: deterministic tokens, with the timing of a GPU profile. For load tests and large demos.

Turns, switches, prefetching, swapping and preemption are those of the torch engine, by the same policies; only the
arithmetic of a forward pass and the copying of bytes are replaced by waiting.
"""

from collections.abc import Callable

from dataplane.engine import EngineOutput, EngineRequest, EngineStats
from dataplane.engines.replay_memory import KvMemory, WeightsMemory
from dataplane.engines.replay_models import ReplayModel, replayed
from dataplane.engines.replay_report import instance_stats, pool_stats
from dataplane.engines.replay_requests import ReplayRequests
from dataplane.engines.replay_settings import ReplaySettings
from dataplane.engines.replay_steps import ReplaySteps
from dataplane.engines.turn_log import TurnLog
from dataplane.errors import ModelLoadError, UnknownInstanceError
from dataplane.messages import ModelSpec
from dataplane.turns.decode import BatchFacts
from dataplane.turns.load import DecodeShare
from dataplane.turns.prefill import PrefillQueue
from dataplane.turns.schedule import SlotFacts, SlotState, Turn, choose_turn

__all__ = ["ReplayEngine", "ReplaySettings"]


class ReplayEngine:
    """Meets `dataplane.engine.Engine`. A step waits, through `sleep`, until its profiled time is over."""

    def __init__(self, settings: ReplaySettings, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._settings = settings
        self._clock = clock
        self._models: dict[str, ReplayModel] = {}
        self._weights = WeightsMemory(settings.weights_bytes)
        self._kv = KvMemory(settings.kv_bytes, settings.host_kv_bytes)
        self._requests = ReplayRequests(settings, self._models, self._kv, clock)
        self._steps = ReplaySteps(
            settings, self._models, self._weights, self._kv, recompute=self._requests.queue, clock=clock, sleep=sleep
        )
        self._state = SlotState()
        self._batches: tuple[BatchFacts, ...] = ()
        self._share = DecodeShare()
        self._turn: Turn | None = None
        self._running_model: str | None = None
        self._log = TurnLog()

    def prepare(self, model: ModelSpec) -> None:
        """Check that the model fits. Nothing is read: it need not exist.

        Raises:
            dataplane.errors.ModelLoadError: weights or one token of KV do not fit.
        """
        limits = (
            ("weights_bytes", model.weights_bytes, self._settings.weights_bytes),
            ("kv_bytes_per_token", model.kv_bytes_per_token, self._settings.kv_bytes),
        )
        for name, value, limit in limits:
            if not 0 < value <= limit:
                raise ModelLoadError(f"{name} of {model.name} is {value}; it must be 1 to {limit} here", param=name)

    def load(self, instance_id: str, model: ModelSpec, *, gpus: int = 1) -> None:
        """Take an instance in. Instances of one model share its weights, and all share the slot's KV.

        Raises:
            dataplane.errors.ModelLoadError: weights or one token of KV do not fit, or the id is taken.
        """
        if self._model_of(instance_id) is not None:
            raise ModelLoadError(f"instance {instance_id} is loaded already", param="instance_id")
        self.prepare(model)
        if model.name not in self._models:
            self._models[model.name] = replayed(model, self._settings.profile, gpus, self._settings.speed)
        self._models[model.name].instances.add(instance_id)

    def unload(self, instance_id: str) -> None:
        """Forget an instance; its requests end with an error at the next step. Unknown ids are ignored."""
        model = self._model_of(instance_id)
        if model is None:
            return
        self._requests.end_all(self._requests.of_instance(instance_id), f"instance {instance_id} was unloaded")
        model.instances.remove(instance_id)
        if not model.instances:
            self._weights.evict(model.spec.name)
            del self._models[model.spec.name]

    def add(self, request: EngineRequest) -> None:
        """Queue a request, or let it decode at once where its KV can be read.

        Raises:
            dataplane.errors.UnknownInstanceError: the instance is not loaded.
            dataplane.errors.ContextLengthError: it fits neither the context nor, alone, the slot's KV memory.
            dataplane.errors.BadRequestError: the prompt is empty or the id is in use.
        """
        model = self._model_of(request.instance_id)
        if model is None:
            raise UnknownInstanceError(f"instance {request.instance_id} is not loaded", param="instance_id")
        self._requests.add(request, model)

    def cancel(self, request_id: str) -> None:
        """Drop a request and its KV now."""
        self._requests.cancel(request_id)

    def release(self, request_id: str) -> None:
        """Free the KV of a request that was handed over. Unknown ids are ignored."""
        self._requests.release(request_id)

    def has_work(self) -> bool:
        """Whether a step would return or do anything."""
        return bool(self._requests)

    @property
    def load_alpha(self) -> float:
        """The load of the slot, by what it did: above 1 it does not keep up; 0 when nothing decodes."""
        return self._share.load(self._batches)

    def step(self) -> list[EngineOutput]:
        """Run one step of the turn that `choose_turn` names, and say what came of it."""
        now_s = self._clock()
        self._kv.settle(now_s)
        if self._settings.hands_over:
            self._requests.hand_over(now_s)
        outputs = self._requests.tell_ended()
        facts = self._facts(now_s)
        self._batches = facts.batches
        turn, self._state = choose_turn(facts, self._state, now_s, self._settings.turns)
        self._turn = turn
        self._log.turn(turn, now_s)
        if turn is None:
            if self._requests:
                self._steps.wait(now_s)
            return outputs
        self._running_model = turn.model
        made = self._steps.run(turn, self._requests.find(turn.group), now_s)
        if made is not None:
            self._log.step(len(made))
            outputs += [self._requests.take_token(sequence) for sequence in made]
        took_s = self._clock() - now_s
        self._state = self._state.spent(turn.kind, took_s, ran=made is not None)
        if facts.batches:
            self._share = self._share.observe(took_s, decoded=turn.kind == "decode" and bool(made))
        return outputs

    def stats(self) -> EngineStats:
        """The load right now."""
        now_s, free_bytes = self._clock(), self._kv.free_bytes
        return EngineStats(
            instances=tuple(
                instance_stats(
                    instance_id,
                    self._requests.of_instance(instance_id),
                    kv_free_bytes=free_bytes,
                    kv_tokens_max=self._settings.kv_bytes // model.spec.kv_bytes_per_token,
                )
                for model in self._models.values()
                for instance_id in sorted(model.instances)
            ),
            resident_models=self._weights.resident_models(now_s),
            switches_total=self._log.switches_total,
            steps_total=self._log.steps_total,
            tokens_total=self._log.tokens_total,
            pool=pool_stats(
                now_s=now_s,
                turn=self._turn,
                load=self.load_alpha,
                weights=self._weights,
                kv=self._kv,
                requests=self._requests,
                log=self._log,
            ),
            extra={
                "preemptions": float(self._steps.preemptions_total),
                "recomputed": float(self._steps.recomputed_total),
                "swapped_out": float(self._kv.swapped_out_total),
                "swapped_in": float(self._kv.swapped_in_total),
            },
        )

    def _facts(self, now_s: float) -> SlotFacts:
        """What the turn policy must know. Prefills that found no room for their KV are held back for a step."""
        prefills = PrefillQueue() if self._steps.prefill_held else self._requests.prefills
        first = {group.model: group.waiting[0].tokens for group in reversed(prefills.groups)}
        decoding = [model for model in self._models.values() if model.decoding and not self._settings.hands_over]
        stay = self._weights.fit(model.weights for model in decoding)
        widest = sorted((model.weights for model in decoding), key=lambda weights: weights.size_bytes)[-2:]
        prefetched = self._settings.prefetch and self._weights.fit(widest)
        busy = {model.spec.name: model for model in decoding} | {name: self._models[name] for name in first}
        return SlotFacts(
            prefills=prefills,
            prefill_s={name: self._models[name].estimate.prefill_s(count, count**2) for name, count in first.items()},
            switch_s={name: self._weights.missing_s(model.weights, now_s) for name, model in busy.items()},
            batches=tuple(
                model.batch_facts(
                    now_s=now_s,
                    switch_s=0.0 if stay else model.weights.switch_s,
                    prefetched=prefetched,
                    batch_max=self._settings.batch_max,
                )
                for model in decoding
            ),
            running_model=self._running_model,
        )

    def _model_of(self, instance_id: str) -> ReplayModel | None:
        return next((model for model in self._models.values() if instance_id in model.instances), None)
