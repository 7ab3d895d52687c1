"""An engine without weights: deterministic tokens, with the timing of a GPU profile. For load tests and large demos.

It batches continuously, keeps a KV budget per instance and switches models by the same `choose_turn` as the torch
engine; only the arithmetic of a forward pass is replaced by waiting. A request that outgrows the KV cache is preempted
(the youngest first), waits, and is prefilled again with what it had generated.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from dataplane.engine import EngineOutput, EngineRequest, EngineStats
from dataplane.engines.replay_queue import Instance, Sequence
from dataplane.errors import BadRequestError, ContextLengthError, ModelLoadError, UnknownInstanceError
from dataplane.messages import ModelSpec
from dataplane.profile import GpuProfile
from dataplane.turns.costs import switch_s
from dataplane.turns.schedule import TIER_RANKS, ModelQueueFacts, TurnFacts, TurnSettings, choose_turn
from dataplane.words import WORDS


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """`weights_bytes` is the room for weights on the slot, `kv_bytes_per_gpu` that for KV on each GPU
    of an instance.

    `speed` divides every time. Token ids are below `vocabulary_size`. `mean_tokens`: answers end by themselves after
    about so many tokens (geometrically distributed); None lets each run to its `max_tokens`.
    """

    profile: GpuProfile
    weights_bytes: int
    kv_bytes_per_gpu: int
    batch_max: int = 64
    speed: float = 1.0
    vocabulary_size: int = len(WORDS)
    mean_tokens: int | None = None
    turn: TurnSettings = field(default_factory=TurnSettings)


class ReplayEngine:
    """Meets `dataplane.engine.Engine`. A step waits, through `sleep`, until its profiled time is over."""

    def __init__(self, settings: ReplaySettings, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._instances: dict[str, Instance] = {}
        self._home: dict[str, Instance] = {}
        self._ended: list[EngineOutput] = []
        self._resident: dict[str, int] = {}
        self._current_model: str | None = None
        self._turn_started_s = 0.0
        self._switches_total = 0
        self._steps_total = 0
        self._tokens_total = 0

    def load(self, instance_id: str, model: ModelSpec, *, gpus: int = 1) -> None:
        """Take an instance in. Nothing is read: the model need not exist.

        Raises:
            dataplane.errors.ModelLoadError: weights or one token of KV do not fit, or the id is taken.
        """
        if instance_id in self._instances:
            raise ModelLoadError(f"instance {instance_id} is loaded already", param="instance_id")
        limits = (
            ("weights_bytes", model.weights_bytes, self._settings.weights_bytes),
            ("kv_bytes_per_token", model.kv_bytes_per_token, self._settings.kv_bytes_per_gpu * gpus),
        )
        for name, value, limit in limits:
            if not 0 < value <= limit:
                raise ModelLoadError(f"{name} of {model.name} is {value}; it must be 1 to {limit} here", param=name)
        self._instances[instance_id] = Instance(
            instance_id=instance_id,
            model=model,
            latency=self._settings.profile.nearest_model(model.weights_bytes, gpus).latency,
            kv_capacity_bytes=self._settings.kv_bytes_per_gpu * gpus,
            gpus=gpus,
        )

    def unload(self, instance_id: str) -> None:
        """Forget an instance; its requests end with an error at the next step. Unknown ids are ignored."""
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        for sequence in instance.sequences():
            request_id = sequence.request.request_id
            del self._home[request_id]
            self._ended.append(EngineOutput(request_id=request_id, error=f"instance {instance_id} was unloaded"))
        if all(other.model.name != instance.model.name for other in self._instances.values()):
            self._resident.pop(instance.model.name, None)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; see `Engine.add`.

        Raises:
            dataplane.errors.UnknownInstanceError: the instance is not loaded.
            dataplane.errors.ContextLengthError: it fits neither the context nor, alone, the instance's KV cache.
            dataplane.errors.BadRequestError: the prompt is empty or the id is in use.
        """
        instance = self._instances.get(request.instance_id)
        if instance is None:
            raise UnknownInstanceError(f"instance {request.instance_id} is not loaded", param="instance_id")
        if not request.prompt:
            raise BadRequestError("prompt must hold at least one token", param="prompt")
        if request.request_id in self._home:
            raise BadRequestError(f"request {request.request_id} is running already", param="request_id")
        tokens = len(request.prompt) + request.max_tokens
        tokens_max = min(instance.model.context_tokens, instance.kv_tokens_max)
        if tokens > tokens_max:
            raise ContextLengthError(
                f"prompt of {len(request.prompt)} and max_tokens of {request.max_tokens} make {tokens} tokens; "
                f"{instance.model.name} takes at most {tokens_max} here",
                param="max_tokens",
            )
        if len(request.generated) >= request.max_tokens:
            self._ended.append(EngineOutput(request_id=request.request_id, finish_reason="length"))
            return
        instance.waiting.append(
            Sequence(
                request=request,
                key=_sampling_key(instance.model.name, request),
                arrived_s=self._clock(),
                generated=len(request.generated),
            )
        )
        instance.waiting.sort(key=lambda sequence: TIER_RANKS[sequence.request.tier])
        self._home[request.request_id] = instance

    def cancel(self, request_id: str) -> None:
        """Drop a request and its KV now."""
        instance = self._home.pop(request_id, None)
        if instance is not None:
            instance.running = [s for s in instance.running if s.request.request_id != request_id]
            instance.waiting = [s for s in instance.waiting if s.request.request_id != request_id]

    def has_work(self) -> bool:
        """Whether a step would return or do anything."""
        return bool(self._home) or bool(self._ended)

    def step(self) -> list[EngineOutput]:
        """Prefill what was just admitted of the model whose turn it is, or else make a token for all that runs."""
        started_s = self._clock()
        outputs, self._ended = self._ended, []
        facts = TurnFacts(
            queues=self._queues(started_s), current_model=self._current_model, turn_started_s=self._turn_started_s
        )
        turn = choose_turn(facts, started_s, self._settings.turn)
        if turn is None:
            return outputs
        self._turn_started_s = turn.started_s
        duration_s = self._switch_to(turn.model)
        for instance in self._instances.values():
            if instance.model.name == turn.model and instance.sequences():
                step_s, batch = self._plan_step(instance)
                duration_s += step_s
                outputs += self._make_tokens(instance, batch)
        self._steps_total += 1
        until_s = started_s + duration_s / self._settings.speed
        self._sleep(max(0.0, until_s - self._clock()))
        return outputs

    def stats(self) -> EngineStats:
        """The load right now."""
        return EngineStats(
            instances=tuple(instance.stats() for instance in self._instances.values()),
            resident_models=tuple(sorted(self._resident)),
            switches_total=self._switches_total,
            steps_total=self._steps_total,
            tokens_total=self._tokens_total,
        )

    def _queues(self, now_s: float) -> tuple[ModelQueueFacts, ...]:
        by_model: dict[str, list[Instance]] = {}
        for instance in self._instances.values():
            by_model.setdefault(instance.model.name, []).append(instance)
        return tuple(self._queue(model, instances, now_s) for model, instances in by_model.items())

    def _queue(self, model: str, instances: list[Instance], now_s: float) -> ModelQueueFacts:
        waiting = [sequence for instance in instances for sequence in instance.waiting]
        running = [sequence for instance in instances for sequence in instance.running]
        ranks = [TIER_RANKS[sequence.request.tier] for sequence in running + waiting]
        return ModelQueueFacts(
            model=model,
            running=len(running),
            waiting=len(waiting),
            oldest_waiting_age_s=max((now_s - sequence.arrived_s for sequence in waiting), default=0.0),
            resident=model in self._resident,
            best_tier_rank=min(ranks, default=max(TIER_RANKS.values())),
        )

    def _switch_to(self, model: str) -> float:
        """Make a model the running one; the seconds its weights take to arrive. The longest unused ones give way."""
        if model != self._current_model:
            self._current_model = model
            self._switches_total += 1
        if model in self._resident:
            self._resident[model] = self._resident.pop(model)
            return 0.0
        instance = next(i for i in self._instances.values() if i.model.name == model)
        weights_bytes = instance.model.weights_bytes
        while sum(self._resident.values()) + weights_bytes > self._settings.weights_bytes:
            del self._resident[next(iter(self._resident))]
        self._resident[model] = weights_bytes
        profile = self._settings.profile
        return switch_s(weights_bytes, profile.pcie_bytes_per_s * instance.gpus, profile.transfer_efficiency)

    def _plan_step(self, instance: Instance) -> tuple[float, list[Sequence]]:
        """Seconds of this step, and the requests that get a token from it."""
        instance.preempt()
        instance.admit(self._settings.batch_max)
        fresh = [sequence for sequence in instance.running if not sequence.prefilled]
        if fresh:
            lengths = [sequence.tokens for sequence in fresh]
            return instance.latency.prefill_s(sum(lengths), sum(length**2 for length in lengths)), fresh
        return instance.latency.decode_s(instance.kv_tokens, len(instance.running)), list(instance.running)

    def _make_tokens(self, instance: Instance, batch: list[Sequence]) -> list[EngineOutput]:
        outputs = []
        for sequence in batch:
            sequence.prefilled = True
            output = self._next_token(sequence)
            outputs.append(output)
            if output.finish_reason is not None:
                instance.running.remove(sequence)
                del self._home[sequence.request.request_id]
        return outputs

    def _next_token(self, sequence: Sequence) -> EngineOutput:
        request = sequence.request
        drawn = blake2b(sequence.tokens.to_bytes(8, "little"), key=sequence.key, digest_size=16).digest()
        chance = int.from_bytes(drawn[:8], "little") / 2**64
        mean_tokens = self._settings.mean_tokens
        if mean_tokens is not None and not request.ignore_eos and chance < 1 / mean_tokens:
            return EngineOutput(request_id=request.request_id, finish_reason="stop")
        sequence.generated += 1
        self._tokens_total += 1
        return EngineOutput(
            request_id=request.request_id,
            token_ids=(int.from_bytes(drawn[8:], "little") % self._settings.vocabulary_size,),
            finish_reason="length" if sequence.generated >= request.max_tokens else None,
        )


def _sampling_key(model: str, request: EngineRequest) -> bytes:
    """What the tokens of a request hang on besides their position. Greedy answers do not hang on the seed."""
    seed = request.seed if request.temperature > 0 else 0
    return blake2b(repr((model, request.prompt, seed)).encode(), digest_size=32).digest()
