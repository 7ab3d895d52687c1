"""The torch engine: four verbs of a slot (`load`, `add`, `step`, `cancel`) over one device.

A step: ask whose turn it is, bring that model's weights into the arena, plan a step batch of one of its instances, run
one forward pass, choose tokens, hand them out. Everything a step may take long over happens here and nowhere else.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from dataplane.engine import EngineOutput, EngineRequest, EngineStats, InstanceStats
from dataplane.engines.torch.batching import Chunk, InstanceQueue, TokenSequence
from dataplane.engines.torch.runner import make_cache, run_chunks
from dataplane.engines.torch.sampler import Draw, choose_tokens
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.engines.torch.weights import LoadedModel, WeightArena, load_model
from dataplane.errors import BadRequestError, ContextLengthError, ModelLoadError, UnknownInstanceError
from dataplane.messages import ModelSpec
from dataplane.turns.schedule import TIER_RANKS, ModelQueueFacts, Turn, TurnFacts, choose_turn


@dataclass(eq=False, kw_only=True)
class Instance:
    """One copy of a model on the slot: its own queue and KV cache over shared weights."""

    instance_id: str
    spec: ModelSpec
    model: LoadedModel
    queue: InstanceQueue
    cache: torch.Tensor
    stepped: int = 0

    @property
    def context_tokens(self) -> int:
        """The longest sequence: what the control plane says, or the model itself, whichever is less."""
        return min(self.spec.context_tokens, self.model.skeleton.geometry.context_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        return self.cache[0].nbytes


class TorchEngine:
    """Meets `dataplane.engine.Engine`. Single-threaded: its owner calls one method at a time."""

    def __init__(self, settings: TorchEngineSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
        self._device = torch.device(settings.device)
        self._arena = WeightArena(settings.weights_bytes, self._device)
        self._instances: dict[str, Instance] = {}
        self._requests: dict[str, tuple[Instance, TokenSequence]] = {}
        self._ended: dict[str, EngineOutput] = {}
        self._turn: Turn | None = None
        self._running_model: str | None = None
        self._arrivals = 0
        self._switches_total = 0
        self._steps_total = 0
        self._tokens_total = 0

    def load(self, instance_id: str, model: ModelSpec, *, gpus: int = 1) -> None:
        """Take an instance in. Weights are read once per model, however many instances it has here.

        Raises:
            ModelLoadError: the checkpoint cannot be used, or does not fit; nothing is kept of it.
        """
        if instance_id in self._instances:
            raise ModelLoadError(f"instance {instance_id} is loaded already")
        loaded = self._loaded(model)
        block_tokens = self._settings.block_tokens
        block_bytes = loaded.skeleton.geometry.kv_bytes_per_token(self._dtype) * block_tokens
        blocks = self._settings.kv_bytes_per_gpu * gpus // block_bytes
        if blocks == 0:
            limit = self._settings.kv_bytes_per_gpu * gpus
            raise ModelLoadError(
                f"{model.name}: a KV block of {block_bytes} bytes exceeds the {limit} bytes"
                f" of an instance on {gpus} GPUs"
            )
        try:
            cache = make_cache(loaded.skeleton, blocks, block_tokens, self._dtype, self._device)
        except RuntimeError as error:
            raise ModelLoadError(f"{model.name}: no memory for {blocks} KV blocks: {error}") from error
        queue = InstanceQueue(
            blocks=blocks,
            block_tokens=block_tokens,
            batch_max=self._settings.batch_max,
            prefill_tokens_max=self._settings.prefill_tokens_per_step_max,
        )
        self._instances[instance_id] = Instance(
            instance_id=instance_id, spec=model, model=loaded, queue=queue, cache=cache
        )

    def unload(self, instance_id: str) -> None:
        """Forget an instance; with the last one of its model go the weights. Its requests end with an error."""
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        self._end_all([instance], f"instance {instance_id} was unloaded")
        if not self._instances_of(instance.model.name):
            self._arena.evict(instance.model.name)

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            UnknownInstanceError: the instance is not loaded.
            ContextLengthError: prompt + max_tokens exceed context or the instance's whole KV cache.
            BadRequestError: an id in use, an empty prompt, or a token the model does not know.
        """
        instance = self._instances.get(request.instance_id)
        if instance is None:
            raise UnknownInstanceError(f"instance {request.instance_id} is not loaded")
        if request.request_id in self._requests or request.request_id in self._ended:
            raise BadRequestError(f"request id {request.request_id} is in use", param="request_id")
        _check_fits(request, instance)
        if len(request.generated) >= request.max_tokens:
            self._ended[request.request_id] = EngineOutput(request_id=request.request_id, finish_reason="length")
            return
        self._arrivals += 1
        sequence = TokenSequence(request=request, order=self._arrivals, added_s=self._clock())
        instance.queue.add(sequence)
        self._requests[request.request_id] = (instance, sequence)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free what it holds, now. Nothing more is heard of it."""
        self._ended.pop(request_id, None)
        if request_id in self._requests:
            self._forget(request_id)

    def step(self) -> list[EngineOutput]:
        """Run one forward pass of the model whose turn it is, and say what came of it."""
        outputs = list(self._ended.values())
        self._ended.clear()
        now_s = self._clock()
        self._turn = choose_turn(self._turn_facts(now_s), now_s, self._settings.turns)
        if self._turn is None:
            return outputs
        instances = self._instances_of(self._turn.model)
        instance = min((i for i in instances if i.queue.sequences), key=lambda i: i.stepped)
        try:
            return outputs + self._run(instance, now_s)
        except torch.AcceleratorError:
            raise  # the device's context is lost for every model: the worker must die and be replaced
        except Exception as error:  # whatever a model's code raises must not take the other models down
            self._end_all(instances, f"model {instance.model.name} failed: {type(error).__name__}: {error}")
            self._arena.evict(instance.model.name)
            outputs += self._ended.values()
            self._ended.clear()
            return outputs

    def has_work(self) -> bool:
        """Whether a request is running or waiting, or an end is still to be told."""
        return bool(self._requests or self._ended)

    def stats(self) -> EngineStats:
        """The load right now. `extra`: preemptions of the instances loaded now."""
        instances = self._instances.values()
        return EngineStats(
            instances=tuple(_instance_stats(instance) for instance in instances),
            resident_models=self._arena.resident_models,
            switches_total=self._switches_total,
            steps_total=self._steps_total,
            tokens_total=self._tokens_total,
            extra={"preemptions": float(sum(instance.queue.preemptions_total for instance in instances))},
        )

    def _loaded(self, spec: ModelSpec) -> LoadedModel:
        present = self._instances_of(spec.name)
        if not present:
            return load_model(spec.name, Path(spec.path), self._dtype, self._device, self._settings.weights_bytes)
        if present[0].spec.path != spec.path:
            raise ModelLoadError(f"{spec.name} is loaded from {present[0].spec.path}, not from {spec.path}")
        return present[0].model

    def _instances_of(self, model: str) -> list[Instance]:
        return [instance for instance in self._instances.values() if instance.model.name == model]

    def _turn_facts(self, now_s: float) -> TurnFacts:
        names = {instance.model.name for instance in self._instances.values()}
        resident = self._arena.resident_models
        queues = tuple(
            _queue_facts(name, [instance.queue for instance in self._instances_of(name)], name in resident, now_s)
            for name in sorted(names)
        )
        current = self._turn
        return TurnFacts(
            queues=queues,
            current_model=current.model if current else None,
            turn_started_s=current.started_s if current else now_s,
        )

    def _run(self, instance: Instance, now_s: float) -> list[EngineOutput]:
        """One step of one instance, whose model has the turn."""
        self._arena.make_resident(instance.model, now_s)
        if self._running_model != instance.model.name:
            self._switches_total += 1
            self._running_model = instance.model.name
        self._steps_total += 1
        instance.stepped = self._steps_total
        chunks = instance.queue.plan_step()
        assert chunks, "a queue with sequences always has a next step"
        logits = run_chunks(instance.model.skeleton, instance.cache, chunks)
        makers = [index for index, chunk in enumerate(chunks) if chunk.makes_token]
        draws = [_draw(chunks[index].sequence, instance.model.skeleton.eos_ids) for index in makers]
        tokens = choose_tokens(logits[makers], draws) if makers else []
        for chunk in chunks:
            chunk.sequence.cached += chunk.count
        return [self._take(chunks[index], instance, token) for index, token in zip(makers, tokens, strict=True)]

    def _take(self, chunk: Chunk, instance: Instance, token: int | None) -> EngineOutput:
        """Append a chosen token to its sequence, and end the sequence where it ends."""
        sequence = chunk.sequence
        request_id = sequence.request.request_id
        if token is None or token in instance.model.skeleton.eos_ids:
            self._forget(request_id)
            if token is None:
                return EngineOutput(request_id=request_id, error=f"{instance.model.name}: logits are not numbers")
            return EngineOutput(request_id=request_id, finish_reason="stop")
        sequence.tokens.append(token)
        self._tokens_total += 1
        if sequence.generated < sequence.request.max_tokens:
            return EngineOutput(request_id=request_id, token_ids=(token,))
        self._forget(request_id)
        return EngineOutput(request_id=request_id, token_ids=(token,), finish_reason="length")

    def _forget(self, request_id: str) -> None:
        instance, sequence = self._requests.pop(request_id)
        instance.queue.remove(sequence)

    def _end_all(self, instances: Iterable[Instance], error: str) -> None:
        for instance in instances:
            for sequence in instance.queue.sequences:
                request_id = sequence.request.request_id
                self._forget(request_id)
                self._ended[request_id] = EngineOutput(request_id=request_id, error=error)


def _check_fits(request: EngineRequest, instance: Instance) -> None:
    if not request.prompt:
        raise BadRequestError("the prompt is empty", param="prompt")
    if request.max_tokens < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens")
    vocabulary = instance.model.skeleton.geometry.vocabulary
    unknown = next((token for token in (*request.prompt, *request.generated) if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise BadRequestError(f"token {unknown} is outside of the vocabulary of {vocabulary}", param="prompt")
    wanted = len(request.prompt) + request.max_tokens
    for what, limit in (("context", instance.context_tokens), ("KV cache", instance.queue.capacity_tokens)):
        if wanted > limit:
            asked = f"{len(request.prompt)} prompt tokens and max_tokens={request.max_tokens}"
            raise ContextLengthError(f"{asked} exceed the {what} of {limit} tokens", param="max_tokens")


def _draw(sequence: TokenSequence, eos_ids: frozenset[int]) -> Draw:
    request = sequence.request
    return Draw(
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        position=len(sequence.tokens),
        banned=tuple(sorted(eos_ids)) if request.ignore_eos else (),
    )


def _queue_facts(model: str, queues: list[InstanceQueue], resident: bool, now_s: float) -> ModelQueueFacts:
    waiting = [sequence for queue in queues for sequence in queue.waiting]
    ranks = [TIER_RANKS[sequence.request.tier] for queue in queues for sequence in queue.sequences]
    return ModelQueueFacts(
        model=model,
        running=sum(len(queue.running) for queue in queues),
        waiting=len(waiting),
        oldest_waiting_age_s=max((now_s - sequence.added_s for sequence in waiting), default=0.0),
        resident=resident,
        best_tier_rank=min(ranks, default=max(TIER_RANKS.values())),
    )


def _instance_stats(instance: Instance) -> InstanceStats:
    queue = instance.queue
    return InstanceStats(
        instance_id=instance.instance_id,
        kv_used_bytes=queue.pool.used_blocks * instance.block_bytes,
        kv_capacity_bytes=queue.pool.blocks * instance.block_bytes,
        remaining_tokens=sum(sequence.remaining_tokens for sequence in queue.sequences),
        running=len(queue.running),
        waiting=len(queue.waiting),
    )
