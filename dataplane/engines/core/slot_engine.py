"""The base of every engine: the operations of a slot (`load`, `add`, `step`, `cancel`).

A step completes transfers, asks the scheduler for the turn, runs one step batch of that model, and returns its outputs.
What a step batch does to weights and KV, and how long it takes, is specific to each engine.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, Protocol, TypeVar, cast

from msgspec.structs import replace

from dataplane.engines.core.kv import DEVICE, NONE, SWAPPING_IN, KvMemory, KvT
from dataplane.engines.core.kv_allocator import KvAllocator
from dataplane.engines.core.pressure import OnShortage, always_swap
from dataplane.engines.core.request_table import RequestTable
from dataplane.engines.core.sequences import TokenSequence
from dataplane.engines.core.served_models import ServedModel
from dataplane.engines.core.slice_log import SliceLog
from dataplane.engines.core.step_batches import StepBatches
from dataplane.engines.interface import EngineOutput, EngineRequest, EngineStats, InstanceStats, PoolStats, TokenScore
from dataplane.protocol.errors import ModelLoadError, UnknownInstanceError
from dataplane.protocol.messages import ModelSpec
from dataplane.scheduling.decode import BatchFacts, idle_s
from dataplane.scheduling.load import DecodeShare
from dataplane.scheduling.prefill import PrefillQueue
from dataplane.scheduling.schedule import SlotFacts, SlotState, Turn, TurnSettings, choose_turn, hold_prefills
from dataplane.scheduling.swaps import slice_load_s

_NO_FACTS = SlotFacts()
"""Those of a slot on which nothing waits and nothing decodes."""


class SlotSettings(Protocol):
    """What the settings of every engine have; see `TorchEngineSettings`."""

    @property
    def batch_max(self) -> int: ...

    @property
    def prefill_tokens_per_step_max(self) -> int: ...

    @property
    def prefetch(self) -> bool:
        """Whether the next model is loaded while another runs."""

    @property
    def prefill_only(self) -> bool:
        """Whether requests leave after their first token, to be decoded by another slot."""

    @property
    def turns(self) -> TurnSettings:
        """Settings of the scheduler."""


Made = list[tuple[TokenSequence[KvT], int | None, TokenScore | None]]
"""Sequences, their new tokens (None where the model ended the answer, and where it is pooled), and the scores of those
that want them.
"""

ModelT = TypeVar("ModelT", bound=ServedModel)  # type: ignore[type-arg]


class SlotEngine(ABC, Generic[ModelT, KvT]):
    """Meets `dataplane.engines.interface.Engine`, except for `prepare`. Its owner calls one method at a time."""

    def __init__(
        self,
        settings: SlotSettings,
        clock: Callable[[], float],
        kv: KvMemory[KvT],
        *,
        reclaim: Callable[[str | None], bool],
        on_shortage: OnShortage = always_swap,
    ) -> None:
        """`reclaim`, `on_shortage`: see `KvAllocator`."""
        self._slot = settings
        self._clock = clock
        self.models: dict[str, ModelT] = {}
        self._model_of: dict[str, ModelT] = {}
        """By instance."""
        self._failed: dict[str, str] = {}
        """Models that can answer nothing until they are loaded anew, with the reason."""
        self.requests = RequestTable(self.models, kv, settings.turns.prefill, clock)
        self._by_deadlines = settings.turns.time_slices == "deadlines"
        self._allocator = KvAllocator(
            self.models,
            kv,
            self.requests,
            prefill_only=settings.prefill_only,
            reclaim=reclaim,
            on_shortage=on_shortage,
            idle_s=lambda model: idle_s(self.state.round, model, clock()) if self._by_deadlines else 0.0,
            by_deadlines=self._by_deadlines,
        )
        self._step_batches = StepBatches(
            self._allocator,
            kv,
            batch_max=settings.batch_max,
            prefill_tokens_max=settings.prefill_tokens_per_step_max,
            left_s=lambda: self.state.round.ends_s - clock() if self._by_deadlines else -math.inf,
        )
        self._memory = kv
        self.state = SlotState()
        self._batches: tuple[BatchFacts, ...] = ()
        self._share = DecodeShare()
        self._last_model: str | None = None
        self._loads = 0
        self._hold = 0
        self._log = SliceLog()

    @abstractmethod
    def prepare(self, model: ModelSpec) -> None:
        """See `Engine.prepare`."""

    def is_prepared(self, model: ModelSpec) -> bool:
        """See `Engine.is_prepared`. Engines whose `unload` drops what `prepare` has read have their own."""
        return True

    def forget(self, model: ModelSpec) -> None:
        """See `Engine.forget`. Engines whose `prepare` keeps adapters have their own."""

    @abstractmethod
    def _new_model(self, spec: ModelSpec, gpus: int) -> ModelT:
        """The model of a prepared spec."""

    @abstractmethod
    def _forget_model(self, model: ModelT) -> None:
        """Free the memory of a model, except for KV."""

    @abstractmethod
    def _load_adapter(self, model: ModelT, spec: ModelSpec) -> None:
        """Make a prepared adapter usable by the model's requests. Idempotent.

        Raises:
            ModelLoadError: there is no memory for it, or the engine serves no adapters.
        """

    @abstractmethod
    def _unload_adapter(self, model: ModelT, name: str) -> None:
        """Free the memory of an adapter that no instance needs. Its model may be forgotten next."""

    @abstractmethod
    def _settle(self) -> None:
        """Complete transfers, and queue sequences whose KV was lost by a failed one."""

    @abstractmethod
    def _fit_together(self, models: Iterable[ModelT]) -> bool:
        """Whether the weights of all these models fit on the slot at once."""

    @abstractmethod
    def _switch_s(self, model: ModelT) -> float:
        """Seconds to load all weights of a model."""

    @abstractmethod
    def _missing_s(self, model: ModelT, now_s: float) -> float:
        """Seconds until its weights would be loaded if they were requested now."""

    @abstractmethod
    def _is_ready(self, model: ModelT) -> bool:
        """Whether they are in host or device memory."""

    @abstractmethod
    def _run(self, turn: Turn, model: ModelT, now_s: float) -> Made[KvT] | None:
        """Run a step of the turn. None: it could not run because weights, KV or memory for KV were missing."""

    @abstractmethod
    def _wait(self, now_s: float) -> None:
        """Nothing can run: wait for the next transfer, or for a moment."""

    @abstractmethod
    def _kv_tokens_max(self, model: ModelT) -> int:
        """Tokens whose KV one request alone on the slot could fill."""

    @abstractmethod
    def _kv_free_bytes(self, model: ModelT) -> int:
        """Bytes that could be allocated for KV of a model now."""

    @abstractmethod
    def _resident_models(self, now_s: float) -> tuple[str, ...]: ...

    @abstractmethod
    def _memory_stats(self, now_s: float) -> PoolStats:
        """The fields about memory; `stats` adds the others."""

    def load(self, instance_id: str, model: ModelSpec, *, gpus: int = 1) -> None:
        """See `Engine.load`.

        Raises:
            ModelLoadError: the model cannot be used or does not fit, or the id is in use; nothing is kept of it.
        """
        if instance_id in self._model_of:
            raise ModelLoadError(f"instance {instance_id} is loaded already", param="instance_id")
        self.prepare(model)
        try:
            loaded = self._loaded(model.checkpoint, gpus)
            if model.base is not None:
                self._load_adapter(loaded, model)
        except ModelLoadError:
            self.forget(model)
            if model.checkpoint.name in self.models:
                self._forget_unused(self.models[model.checkpoint.name])
            raise
        self._model_of[instance_id] = loaded
        loaded.instances[instance_id] = "" if model.base is None else model.name

    def _loaded(self, checkpoint: ModelSpec, gpus: int) -> ModelT:
        """The model of a prepared checkpoint, which another instance may have loaded."""
        loaded = self.models.get(checkpoint.name)
        if loaded is None:
            loaded = self.models[checkpoint.name] = self._new_model(checkpoint, gpus)
            loaded.load_order = self._loads = self._loads + 1
        return loaded

    def unload(self, instance_id: str) -> None:
        model = self._model_of.pop(instance_id, None)
        if model is None:
            return
        self.requests.end_all(self.requests.of_instance(instance_id), f"instance {instance_id} was unloaded")
        adapter = model.instances.pop(instance_id)
        if adapter and adapter not in model.instances.values():
            self._unload_adapter(model, adapter)
        self._forget_unused(model)

    def _forget_unused(self, model: ModelT) -> None:
        if not model.instances:
            self._forget_model(model)
            del self.models[model.name]
            self._failed.pop(model.name, None)

    def compile(self, request: EngineRequest) -> None:
        """See `Engine.compile`.

        Raises:
            BadRequestError: the constraint cannot be compiled.
        """
        model = self._model_of.get(request.instance_id)
        if model is not None and model.constraints is not None and request.constraint is not None:
            model.constraints.compile(request.constraint)

    def add(self, request: EngineRequest) -> None:
        """See `Engine.add`.

        Raises:
            UnknownInstanceError: the instance is not loaded.
            ContextLengthError: prompt + max_tokens exceed the context or the slot's whole KV memory.
            BadRequestError: an id in use, an empty prompt, max_tokens below 1, or a token outside of the vocabulary.
        """
        model = self._model_of.get(request.instance_id)
        if model is None:
            raise UnknownInstanceError(f"instance {request.instance_id} is not loaded", param="instance_id")
        self.requests.add(request, model, kv_tokens_max=self._kv_tokens_max(model))

    def cancel(self, request_id: str) -> None:
        self.requests.cancel(request_id)

    def release(self, request_id: str) -> None:
        self.requests.release(request_id)

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[EngineOutput]:
        self._settle()
        if self._slot.prefill_only:
            self.requests.export_prefilled()
        now_s = self._clock()
        facts = self._facts(now_s) if self.requests.prefills.groups or not self._slot.prefill_only else _NO_FACTS
        self._batches = facts.batches
        sliced = self.state.slice.model
        turn, state = choose_turn(facts, self.state, now_s, self._slot.turns)
        if turn is None and self._hold:  # which models were tried in this slice is not forgotten
            state = SlotState(slice=self.state.slice)
        self.state = state
        if self._allocator.preemptions_total and self.state.slice.model not in (None, sliced):
            self._begin_slice()
        outputs = self.requests.take_ended()
        if turn is None:
            self._log.turn(None, now_s)
            self._hold = 0
            self._wait(now_s)
            return outputs
        missing_s, blocked = facts.switch_s.get(turn.model, 0.0), turn.model in facts.blocked
        self._log.turn(turn, now_s, missing_s=missing_s, blocked=blocked)
        self._last_model = turn.model
        tokens_before = self._log.tokens_total
        self._step_batches.gave_back = False  # the turn may form no batch
        made = self._run(turn, self.models[turn.model], now_s)
        if made is not None:
            outputs += self._take(made)
            if self._slot.prefill_only:
                self.requests.export_prefilled()
        self._hold = hold_prefills(
            self._hold,
            turn.kind,
            ran=made is not None,
            made_tokens=bool(made) or self._log.tokens_total > tokens_before,
            freeing=self._memory.freeing,
            batches=len(facts.batches),
        )
        took_s = self._clock() - now_s
        self.state = self.state.spent(turn.kind, took_s, ran=made is not None)
        if made is None and not self._is_awaited(turn):
            self.state = self.state.cut_short(now_s)
        if facts.batches:
            decoded = turn.kind == "decode" and self._log.tokens_total > tokens_before
            beside_s = _beside_s(turn, facts, took_s)
            self._share = self._share.observe(took_s - beside_s, decoded=decoded).observe(beside_s, decoded=False)
        return outputs + self.requests.take_ended()

    def _begin_slice(self) -> None:
        """Another model has the time slice, by deadlines, on a slot that has preempted requests."""

    def _take(self, made: Made[KvT]) -> list[EngineOutput]:
        """Record what a step made, and give it to its sequences."""
        tokens, prompts = 0, []
        for sequence, _, _ in made:
            pooling = sequence.request.pooling
            tokens += not pooling  # an embedding is no token
            if not sequence.prefilled:
                prompts.append(sequence.cached - sequence.reused)
                if sequence.first and not pooling:
                    self._log.prefix(sequence.answers_as, len(sequence.tokens), hit=sequence.reused)
        self._log.step(tokens, prompts=prompts)
        return [self.requests.take(sequence, token, score) for sequence, token, score in made]

    def _without_unmatched(self, made: Made[KvT]) -> Made[KvT]:
        """End the requests of a step whose constraint allows no token; the others."""
        for sequence, _, _ in made:
            matcher = sequence.matcher
            if matcher is not None and matcher.error is not None:
                error = f"{sequence.answers_as}: {matcher.error}"
                self.requests.end_all([sequence], error, invalid=matcher.too_complex)
        return [one for one in made if one[0].matcher is None or one[0].matcher.error is None]

    def _is_awaited(self, turn: Turn) -> bool:
        """Whether a KV transfer is under way after which the turn can go on, unlike that of KV its batch gave back."""
        model = self.models.get(turn.model)  # a model that failed is gone
        arriving = model is not None and any(sequence.kv.location is SWAPPING_IN for sequence in model.begun)
        return arriving or (self._memory.freeing and not self._step_batches.gave_back)

    def _facts(self, now_s: float) -> SlotFacts:
        """The facts for the scheduler. After a prefill that found no memory for its KV, prefills are held back."""
        requests = self.requests
        busy = cast("Sequence[ModelT]", requests.busy_models)
        prefills = PrefillQueue() if self._hold else requests.prefills
        unready = [model.name for model in busy if not self._is_ready(model)]
        return SlotFacts(
            prefills=prefills,
            prefill_s=requests.next_prefills_s(prefills),
            switch_s={model.name: self._missing_s(model, now_s) for model in busy},
            load_s={model.name: self._slice_load_s(model) for model in busy} if self._by_deadlines else {},
            batches=() if self._slot.prefill_only else self._batch_facts(busy, unready, prefills, now_s),
            running_model=self._last_model,
            unready=frozenset(unready) if unready else frozenset(),
            blocked=frozenset(self._step_batches.blocked),
            stuck=frozenset(self._step_batches.stuck),
            load=self.load_alpha if prefills.groups else 0.0,
        )

    def _slice_load_s(self, model: ModelT) -> float:
        """Seconds to load a model and its KV, for the length of slices; KV counts until it is on the device."""
        load_s = self._switch_s(model)
        if not self._memory.swapped_out_total:
            return load_s
        away = [sequence.kv for sequence in model.decoding if sequence.kv.location not in (DEVICE, NONE)]
        return slice_load_s(load_s, self._memory.swap_s(away)) if away else load_s

    def _batch_facts(
        self, busy: Sequence[ModelT], unready: Collection[str], prefills: PrefillQueue, now_s: float
    ) -> tuple[BatchFacts, ...]:
        """A round pays for the switches to all decoding models, unless all fit on the slot together; if any two fit,
        one can be loaded while another decodes.
        """
        decoding = [model for model in busy if model.decoding]
        stay = len(decoding) < 2 or self._fit_together(decoding)
        widest = decoding if stay else sorted(decoding, key=lambda model: model.weights_bytes)[-2:]
        prefetched = self._slot.prefetch and (stay or self._fit_together(widest))
        return tuple(
            [
                model.batch_facts(
                    now_s=now_s if prefills.groups or (self._by_deadlines and len(busy) > 1) else None,
                    switch_s=0.0 if stay else self._switch_s(model),
                    prefetched=prefetched,
                    ready=model.name not in unready,
                    batch_max=self._slot.batch_max,
                )
                for model in decoding
            ]
        )

    @property
    def load_alpha(self) -> float:
        """The measured load of the slot: above 1 it cannot keep up; 0 if nothing decodes."""
        return self._share.load(self._batches)

    def stats(self) -> EngineStats:
        """The present load of the slot."""
        now_s, turn = self._clock(), self.state.turn
        return EngineStats(
            instances=tuple(
                self._instance_stats(instance_id, model)
                for model in self.models.values()
                for instance_id in sorted(model.instances)
            ),
            failed={
                instance_id: reason
                for name, reason in self._failed.items()
                for instance_id in sorted(self.models[name].instances)
            },
            resident_models=self._resident_models(now_s),
            switches_total=self._log.switches_total,
            steps_total=self._log.steps_total,
            tokens_total=self._log.tokens_total,
            prefix_query_tokens=dict(self._log.prefix_query_tokens),
            prefix_hit_tokens=dict(self._log.prefix_hit_tokens),
            pool=replace(
                self._memory_stats(now_s),
                running_model=turn.model if turn else None,
                next_model=turn.next_model if turn else None,
                load=self.load_alpha,
                prefills_waiting=sum(len(group.waiting) for group in self.requests.prefills.groups),
                time_slices=tuple(self._log.slices),
                prefill_pace=self._log.prefill_pace,
            ),
            extra={
                "preemptions": float(self._allocator.preemptions_total),
                "recomputed": float(self._allocator.recomputed_total),
                "swapped_out": float(self._memory.swapped_out_total),
                "swapped_in": float(self._memory.swapped_in_total),
            },
        )

    def _instance_stats(self, instance_id: str, model: ModelT) -> InstanceStats:
        """The load of an instance. Its capacity is its own KV and all free KV memory."""
        mine = self.requests.of_instance(instance_id)
        running = sum(sequence.cached > 0 for sequence in mine)
        used_bytes = self._memory.bytes_of(sequence.kv for sequence in mine)
        return InstanceStats(
            instance_id=instance_id,
            kv_tokens_max=self._kv_tokens_max(model),
            kv_used_bytes=used_bytes,
            kv_capacity_bytes=used_bytes + self._kv_free_bytes(model),
            remaining_tokens=sum(model.remaining_tokens(sequence) for sequence in mine),
            running=running,
            waiting=len(mine) - running,
            prefill_s=model.estimate.reference_prefill_s,
            decode_s=model.estimate.reference_decode_s,
        )


def _beside_s(turn: Turn, facts: SlotFacts, took_s: float) -> float:
    """By how much prompts beside the batch made a step longer than the batch alone is estimated to take; 0 where the
    step may have waited for weights.
    """
    if not turn.is_mixed or facts.switch_s.get(turn.model):
        return 0.0
    step_s = next(batch.step_s for batch in facts.batches if batch.model == turn.model)
    return max(0.0, took_s - step_s)
