"""What every engine that switches between models is: the verbs of a slot (`load`, `add`, `step`, `cancel`).

A step: note which transfers are over, ask whose turn it is, run one step batch of that model, and hand out what came
of it. What a step batch does to weights and KV, and how long it takes, is each engine's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from dataplane.engines.core.kv import KvLocation, KvMemory, KvT
from dataplane.engines.core.pressure import Relieve, always_swap
from dataplane.engines.core.request_table import RequestTable
from dataplane.engines.core.room import Room
from dataplane.engines.core.sequences import TokenSequence
from dataplane.engines.core.served_models import ServedModel
from dataplane.engines.core.step_batches import StepBatches
from dataplane.engines.core.turn_log import TurnLog
from dataplane.engines.interface import EngineOutput, EngineRequest, EngineStats, InstanceStats, PoolStats
from dataplane.protocol.errors import ModelLoadError, UnknownInstanceError
from dataplane.protocol.messages import ModelSpec
from dataplane.scheduling.decode import BatchFacts
from dataplane.scheduling.load import DecodeShare
from dataplane.scheduling.prefill import PrefillQueue
from dataplane.scheduling.schedule import SlotFacts, SlotState, Turn, TurnSettings, choose_turn, hold_prefills


class SlotSettings(Protocol):
    """What the settings of every engine have; see `TorchEngineSettings`."""

    @property
    def batch_max(self) -> int:
        """Sequences that a step decodes at most."""

    @property
    def prefill_tokens_per_step_max(self) -> int:
        """Tokens that a step prefills at most."""

    @property
    def prefetch(self) -> bool:
        """Whether the next model comes while another runs."""

    @property
    def hands_over(self) -> bool:
        """Whether a request leaves after its first token, to be decoded by another slot."""

    @property
    def turns(self) -> TurnSettings:
        """Those of the turn policy."""


Made = list[tuple[TokenSequence[KvT], int | None]]
"""Sequences and their new tokens; None where an answer has ended by itself."""

ModelT = TypeVar("ModelT", bound=ServedModel)  # type: ignore[type-arg]


class SlotEngine(ABC, Generic[ModelT, KvT]):
    """Meets `dataplane.engines.interface.Engine`, but for `prepare`. Its owner calls one method at a time."""

    def __init__(
        self,
        settings: SlotSettings,
        clock: Callable[[], float],
        kv: KvMemory[KvT],
        *,
        take_back: Callable[[str | None], bool],
        relieve: Relieve = always_swap,
    ) -> None:
        """`take_back`, `relieve`: see `Room`."""
        self._slot = settings
        self._clock = clock
        self._models: dict[str, ModelT] = {}
        self._model_of: dict[str, ModelT] = {}
        """By instance."""
        self._requests = RequestTable(self._models, kv, settings.turns.prefill, clock)
        self._room = Room(
            self._models, kv, self._requests, hands_over=settings.hands_over, take_back=take_back, relieve=relieve
        )
        self._step_batches = StepBatches(
            self._room, kv, batch_max=settings.batch_max, prefill_tokens_max=settings.prefill_tokens_per_step_max
        )
        self._memory = kv
        self._state = SlotState()
        self._batches: tuple[BatchFacts, ...] = ()
        self._share = DecodeShare()
        self._last_model: str | None = None
        self._loads = 0
        self._held = 0
        self._log = TurnLog()

    @abstractmethod
    def prepare(self, model: ModelSpec) -> None:
        """See `dataplane.engines.interface.Engine.prepare`."""

    @abstractmethod
    def _new_model(self, spec: ModelSpec, gpus: int) -> ModelT:
        """A prepared model that is new to the slot."""

    @abstractmethod
    def _forget_model(self, model: ModelT) -> None:
        """Free what the slot holds of a model besides KV."""

    @abstractmethod
    def _settle(self) -> None:
        """Note what arrived and left, and queue again what got lost on the way."""

    @abstractmethod
    def _fit_together(self, models: Iterable[ModelT]) -> bool:
        """Whether the weights of these could all be on the slot at once."""

    @abstractmethod
    def _switch_s(self, model: ModelT) -> float:
        """How long the weights of a model take to arrive, all of them."""

    @abstractmethod
    def _missing_s(self, model: ModelT, now_s: float) -> float:
        """How long what is missing of them would take to arrive, were it sent for now."""

    @abstractmethod
    def _is_ready(self, model: ModelT) -> bool:
        """Whether they are in some memory."""

    @abstractmethod
    def _run(self, turn: Turn, model: ModelT, now_s: float) -> Made[KvT] | None:
        """Run a step of the turn. None: it could not run for want of weights, of KV or of room for it, and waited."""

    @abstractmethod
    def _wait(self, now_s: float) -> None:
        """Nothing can run now: wait until something is there, or for a moment."""

    @abstractmethod
    def _kv_tokens_max(self, model: ModelT) -> int:
        """What one request alone on the slot could fill."""

    @abstractmethod
    def _kv_free_bytes(self, model: ModelT) -> int:
        """What KV of a model could take now."""

    @abstractmethod
    def _resident_models(self, now_s: float) -> tuple[str, ...]:
        """Models whose weights are on the slot."""

    @abstractmethod
    def _pool_stats(self, now_s: float) -> PoolStats:
        """The state of the pool."""

    def load(self, instance_id: str, model: ModelSpec, *, gpus: int = 1) -> None:
        """Take an instance in. Instances of one model share its weights, and all share the slot's KV.

        Raises:
            ModelLoadError: the model cannot be used or does not fit, or the id is taken; nothing is kept of it.
        """
        if instance_id in self._model_of:
            raise ModelLoadError(f"instance {instance_id} is loaded already", param="instance_id")
        self.prepare(model)
        if model.name not in self._models:
            self._models[model.name] = self._new_model(model, gpus)
            self._models[model.name].load_order = self._loads = self._loads + 1
        loaded = self._model_of[instance_id] = self._models[model.name]
        loaded.instances.add(instance_id)

    def unload(self, instance_id: str) -> None:
        """Forget an instance; with the last one of its model go the weights. Its requests end with an error at the next
        step. Unknown ids are ignored.
        """
        model = self._model_of.pop(instance_id, None)
        if model is None:
            return
        self._requests.end_all(self._requests.of_instance(instance_id), f"instance {instance_id} was unloaded")
        model.instances.remove(instance_id)
        if not model.instances:
            self._forget_model(model)
            del self._models[model.name]

    def add(self, request: EngineRequest) -> None:
        """Queue a request, or let it decode at once where its KV can be read.

        Raises:
            UnknownInstanceError: the instance is not loaded.
            ContextLengthError: prompt + max_tokens exceed the context or the slot's whole KV memory.
            BadRequestError: an id in use, an empty prompt, no token wanted, or a token the model does not know.
        """
        model = self._model_of.get(request.instance_id)
        if model is None:
            raise UnknownInstanceError(f"instance {request.instance_id} is not loaded", param="instance_id")
        self._requests.add(request, model, kv_tokens_max=self._kv_tokens_max(model))

    def cancel(self, request_id: str) -> None:
        """Drop a request and free what it holds, now. Nothing more is heard of it."""
        self._requests.cancel(request_id)

    def release(self, request_id: str) -> None:
        """Free the KV of a request that was handed over. Unknown ids are ignored."""
        self._requests.release(request_id)

    def has_work(self) -> bool:
        """Whether a request is running or waiting, or an end is still to be told."""
        return bool(self._requests)

    def step(self) -> list[EngineOutput]:
        """Run one step of the turn that `choose_turn` names, and say what came of it."""
        self._settle()
        if self._slot.hands_over:
            self._requests.hand_over()
        now_s = self._clock()
        facts = self._facts(now_s)
        self._batches = facts.batches
        turn, self._state = choose_turn(facts, self._state, now_s, self._slot.turns)
        self._log.turn(turn, now_s)
        outputs = self._requests.tell_ended()
        if turn is None:
            self._held = 0
            self._wait(now_s)
            return outputs
        self._last_model = turn.model
        tokens_before = self._log.tokens_total
        made = self._run(turn, self._models[turn.model], now_s)
        if made is not None:
            prompts = [s.cached for s, _ in made if not s.prefilled] if turn.kind == "prefill" else ()
            self._log.step(len(made), prompts=prompts)
            outputs += [self._requests.take(sequence, token) for sequence, token in made]
        self._held = hold_prefills(
            self._held,
            turn.kind,
            ran=made is not None,
            made_tokens=self._log.tokens_total > tokens_before,
            freeing=self._memory.freeing,
            batches=len(facts.batches),
        )
        took_s = self._clock() - now_s
        self._state = self._state.spent(turn.kind, took_s, ran=made is not None)
        if made is None and turn.kind == "decode" and not self._is_awaited(turn.model):
            self._state = self._state.cut_short(now_s)
        if facts.batches:
            decoded = turn.kind == "decode" and self._log.tokens_total > tokens_before
            self._share = self._share.observe(took_s, decoded=decoded)
        return outputs + self._requests.tell_ended()

    def _is_awaited(self, name: str) -> bool:
        """Whether KV is on its way that lets a model go on."""
        model = self._models.get(name)  # it is gone where it failed
        arriving = model is not None and any(sequence.kv.location is KvLocation.SWAPPING_IN for sequence in model.begun)
        return arriving or self._memory.freeing

    def _facts(self, now_s: float) -> SlotFacts:
        """What the turn policy must know. After a prefill that found no room for its KV, prefills are held back."""
        requests = self._requests
        busy = [self._models[model.name] for model in requests.busy_models]
        prefills = PrefillQueue() if self._held else requests.prefills
        unready = frozenset([model.name for model in busy if not self._is_ready(model)])
        return SlotFacts(
            prefills=prefills,
            prefill_s=requests.next_prefills_s(prefills),
            switch_s={model.name: self._missing_s(model, now_s) for model in busy},
            batches=() if self._slot.hands_over else self._batch_facts(busy, unready, prefills, now_s),
            running_model=self._last_model,
            unready=unready,
        )

    def _batch_facts(
        self, busy: Sequence[ModelT], unready: frozenset[str], prefills: PrefillQueue, now_s: float
    ) -> tuple[BatchFacts, ...]:
        """A round pays for the switches to all models that decode, unless they stay on the slot together; where there
        is room for any two, one may come while another decodes.
        """
        decoding = [model for model in busy if model.decoding]
        stay = len(decoding) < 2 or self._fit_together(decoding)
        widest = decoding if stay else sorted(decoding, key=lambda model: model.weights_bytes)[-2:]
        prefetched = self._slot.prefetch and (stay or self._fit_together(widest))
        batches = [
            model.batch_facts(
                now_s=now_s if prefills.groups else None,
                switch_s=0.0 if stay else self._switch_s(model),
                prefetched=prefetched,
                ready=model.name not in unready,
                batch_max=self._slot.batch_max,
            )
            for model in decoding
        ]
        return tuple(batches)

    @property
    def load_alpha(self) -> float:
        """The load of the slot, by what it did: above 1 it does not keep up; 0 when nothing decodes."""
        return self._share.load(self._batches)

    def stats(self) -> EngineStats:
        """The load right now."""
        now_s = self._clock()
        return EngineStats(
            instances=tuple(
                self._instance_stats(instance_id, model)
                for model in self._models.values()
                for instance_id in sorted(model.instances)
            ),
            resident_models=self._resident_models(now_s),
            switches_total=self._log.switches_total,
            steps_total=self._log.steps_total,
            tokens_total=self._log.tokens_total,
            pool=self._pool_stats(now_s),
            extra={
                "preemptions": float(self._room.preemptions_total),
                "recomputed": float(self._room.recomputed_total),
                "swapped_out": float(self._memory.swapped_out_total),
                "swapped_in": float(self._memory.swapped_in_total),
            },
        )

    def _instance_stats(self, instance_id: str, model: ModelT) -> InstanceStats:
        """The load of an instance. It could take what KV memory is free beside its own."""
        mine = self._requests.of_instance(instance_id)
        running = sum(sequence.cached > 0 for sequence in mine)
        used_bytes = sum(sequence.kv.size_bytes for sequence in mine)
        return InstanceStats(
            instance_id=instance_id,
            kv_tokens_max=self._kv_tokens_max(model),
            kv_used_bytes=used_bytes,
            kv_capacity_bytes=used_bytes + self._kv_free_bytes(model),
            remaining_tokens=sum(sequence.remaining_tokens for sequence in mine),
            running=running,
            waiting=len(mine) - running,
        )
