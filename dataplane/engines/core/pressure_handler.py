"""Handling KV pressure on a slot, and reverting it: gather facts, ask the pure policies, apply (Oneiros 5).

The same for every engine whose models can offload weight layers; each describes its memory by `SlotMemory` and
`KvCapacity`. Called between the steps of models only, when no layer is in use.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Generic, Protocol, TypeVar

from msgspec import structs

from dataplane.engines.core.kv import KvLocation, KvT, KvT_contra
from dataplane.engines.core.pressure import KvPressure, Shortage
from dataplane.engines.core.remapping.actions import Action, PressureFacts, Victim, choose_action
from dataplane.engines.core.remapping.caps import ModelFacts, rotation_of, wait_s
from dataplane.engines.core.remapping.circle import Rotation
from dataplane.engines.core.remapping.control import RemapDecision, RemapFacts, RemapState, choose_remap
from dataplane.engines.core.remapping.places import BatchDemand, PlaceFacts, lends_place
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.core.sequences import TokenSequence
from dataplane.engines.core.served_models import ServedModel
from dataplane.engines.core.slot_engine import ModelT, SlotEngine, SlotSettings
from dataplane.engines.interface import PoolStats
from dataplane.scheduling.decode import idle_s
from dataplane.scheduling.tiers import TIER_RANKS


class PressureSettings(SlotSettings, Protocol):
    """What the settings of such an engine have; see `TorchEngineSettings`."""

    @property
    def kv_pressure(self) -> KvPressure: ...

    @property
    def remap(self) -> RemapSettings: ...


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The `count` equal layers of a model that can offload some. KV gains `size_bytes` by each; the other fields are
    those of `ModelFacts`.
    """

    count: int
    size_bytes: int
    load_s: float
    compute_s: float | None
    used_s: float


ModelT_contra = TypeVar("ModelT_contra", bound=ServedModel, contravariant=True)  # type: ignore[type-arg]


class KvCapacity(Protocol[KvT_contra]):
    """KV memory, as far as KV pressure concerns it."""

    @property
    def swap_out_wait_s(self) -> float:
        """Estimated seconds until the transfers to host memory that are under way have ended."""

    def link_bytes_per_s(self, kv: KvT_contra) -> tuple[float, float]:
        """The rates of KV transfers to host memory and from it."""

    def missing_bytes(self, kv: KvT_contra, tokens: int) -> int:
        """Bytes that device memory lacks for the KV of so many tokens, or for KV on the HOST; 0 if it is free."""

    def host_fits(self, kv: KvT_contra, tokens: int) -> bool:
        """Whether host memory has room for the KV of so many tokens."""


class SlotMemory(Protocol[ModelT_contra]):
    """The weights and the KV of a slot, as far as one can use the memory of the other."""

    @property
    def offloaded(self) -> Mapping[str, int]:
        """How many layers are offloaded, by model; models without are left out."""

    @property
    def free_bytes(self) -> int:
        """KV memory that is free in pieces of a layer's memory."""

    def layers(self, model: ModelT_contra, *, decoding: bool) -> Layers | None:
        """The layers of a model whose weights are on the device; None if it can offload none. `compute_s` is that of a
        decode step of its batch if `decoding`, else of a usual prefill.
        """

    def holds(self, model: ModelT_contra) -> bool:
        """Whether a model is on the device or being loaded."""

    def fits_with(self, model: ModelT_contra, *, others: Collection[str]) -> bool:
        """Whether a model that is not on the device could be loaded to run while `others` and all KV stay."""

    @property
    def kv_region_bytes(self) -> int:
        """KV memory, without that of weights."""

    @property
    def place_bytes(self) -> int:
        """The memory for weights beyond that of the slot's largest model."""

    @property
    def lends_place(self) -> bool:
        """Whether KV may use it."""

    def lend_place(self, keep: str | None) -> None:
        """Let KV use it while a model runs, `keep`; None: no longer. KV in it stays until a model needs its memory."""

    def fit_together(self, models: Iterable[ModelT_contra]) -> bool:
        """Whether all memory for weights holds those of all these models."""

    def rotate(self, model: ModelT_contra, rotation: Rotation) -> None:
        """Offload as many layers as the rotation says, at least as many as now; the others share the memory left."""

    def reclaim(self, model: ModelT_contra, count: int) -> int:
        """Reclaim the memory of at most `count` layers, as far as KV has left it; of how many. `rotate` must follow."""


class KvPressureHandler(Generic[ModelT, KvT]):
    """Handles the KV pressure of the slot of an engine. `load_s`: seconds to load all weights of a model. Counts since
    the start: `actions` taken, `declined` offloads by reason, and `layers_moved`.
    """

    def __init__(
        self,
        settings: PressureSettings,
        engine: SlotEngine[ModelT, KvT],
        memory: SlotMemory[ModelT],
        kv: KvCapacity[KvT],
        clock: Callable[[], float],
        *,
        load_s: Callable[[ModelT], float],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._models: Mapping[str, ModelT] = engine.models
        self._memory = memory
        self._kv = kv
        self._clock = clock
        self._load_s = load_s
        self._forced: Action | None = None if settings.kv_pressure == "auto" else settings.kv_pressure
        self._state = RemapState()
        self.actions: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self.layers_moved: Counter[str] = Counter()

    def on_shortage(self, shortage: Shortage) -> Action | None:
        """See `OnShortage`: choose the action; for "remap", offload the layers."""
        decision, wait_s = self._choose_remap(shortage)
        action = choose_action(self.facts(shortage, wait_s), self._forced)
        if action == "remap" and decision is not None and not self._apply(decision):
            action = "swap"
        self.actions[action or "wait"] += 1
        return action

    def counted(self, stats: PoolStats) -> PoolStats:
        """The statistics with the counts of this handler."""
        return structs.replace(
            stats,
            pressure_actions=dict(self.actions),
            offloads_declined=dict(self.declined),
            layers_moved=dict(self.layers_moved),
        )

    def revert(self) -> tuple[str, ...]:
        """Reclaim the memory of offloaded layers that KV has left, if the policy says so; before a step. Returns the
        active models whose layers it cannot reclaim though their steps wait for loads: KV should leave one of these.
        """
        if not self._memory.offloaded:
            return ()
        facts = RemapFacts(models=self._model_facts(), free_bytes=self._memory.free_bytes)
        decision, self._state = choose_remap(facts, self._state, self._clock(), self._settings.remap)
        self._apply(decision)
        active = {model.model for model in facts.models if model.active}
        return tuple(name for name in decision.over if name in active)

    def begin_slice(self) -> None:
        """Lend the place of the next model to KV for the slice that begins, or take it back, as the policy says."""
        lends = self._lends_place()
        if lends != self._memory.lends_place:
            self._memory.lend_place(self._engine.state.slice.model if lends else None)
            self.actions["lend"] += lends

    def _lends_place(self) -> bool:
        """Whether KV has the place of the next model, where models switch by deadlines."""
        if self._settings.prefill_only or self._settings.kv_pressure not in ("auto", "remap"):
            return False
        busy = [self._models[name] for name in self._ranks()]
        decoding = [model for model in busy if any(sequence.kv.size_bytes for sequence in model.decoding)]
        if not decoding or self._memory.fit_together(busy):
            return False
        facts = PlaceFacts(
            batches=tuple(map(self._demand, decoding)),
            kv_bytes=self._memory.kv_region_bytes,
            place_bytes=self._memory.place_bytes,
            load_s=max(map(self._load_s, busy)),
            bytes_per_s=min(min(self._kv.link_bytes_per_s(model.decoding[0].kv)) for model in decoding),
            lent=self._memory.lends_place,
        )
        return lends_place(facts, self._settings.turns.decode, forced=not self._settings.remap.capped)

    def _demand(self, model: ModelT) -> BatchDemand:
        """That of a model's batch. KV in another slot's memory is as large for each token as that of this one."""
        batch = model.decoding[: self._settings.batch_max]
        context, count = sum(sequence.cached for sequence in batch), len(batch)
        here = [sequence for sequence in model.decoding if sequence.kv.size_bytes]
        per_token = sum(sequence.kv.size_bytes for sequence in here) / sum(sequence.cached for sequence in here)
        least_s = model.estimate.decode_s(context // count, 1)
        return BatchDemand(
            sequences=count,
            kv_bytes=ceil(per_token * context),
            step_s=max(model.estimate.decode_s(context, count), least_s),
            least_step_s=least_s,
            tbt_s=min(sequence.tbt_s for sequence in batch),
        )

    def _choose_remap(self, shortage: Shortage) -> tuple[RemapDecision | None, float | None]:
        """What would be offloaded, and for how long a step of an active model would then wait; None: too little."""
        if self._settings.kv_pressure not in ("auto", "remap"):
            return None, None
        models = self._model_facts()
        missing_bytes = self._kv.missing_bytes(shortage.sequence.kv, shortage.tokens)
        facts = RemapFacts(models=models, short_bytes=missing_bytes)
        decision, self._state = choose_remap(facts, self._state, self._clock(), self._settings.remap)
        if decision.missing_bytes or not missing_bytes:
            self.declined.update(decision.capped.values() if models else ["no model"])
            return None, None
        offloading = (model for model in models if model.active and model.model in decision.rotations)
        return decision, max((wait_s(model, decision.rotations[model.model]) for model in offloading), default=0.0)

    def _model_facts(self) -> tuple[ModelFacts, ...]:
        """The models on the device, whole or not, whose layers are of equal size.

        Active is a model that runs or decodes, also while another has its turn, because its own turn will be a decode:
        to models that alternate token by token, temporal sharing is like spatial sharing. The others are inactive.
        The priority is that of the most urgent request; the next model to run is above its equals, and models without
        requests have the lowest.
        """
        offloaded, turn, ranks = self._memory.offloaded, self._engine.state.turn, self._ranks()
        kept = self._kept(ranks)
        facts = []
        for name, model in self._models.items():
            decodes = bool(model.decoding)
            layers = self._memory.layers(model, decoding=decodes)
            if layers is None:
                continue
            is_next = turn is not None and name == turn.next_model
            facts.append(
                ModelFacts(
                    model=name,
                    layers=layers.count,
                    layer_bytes=layers.size_bytes,
                    load_s=layers.load_s,
                    compute_s=layers.compute_s,
                    active=decodes or (turn is not None and name == turn.model),
                    offloaded=offloaded.get(name, 0),
                    priority=2 * (len(TIER_RANKS) - ranks[name]) + is_next if name in ranks else 0,
                    kept=name in kept,
                    used_s=layers.used_s,
                )
            )
        return tuple(facts)

    def _ranks(self) -> dict[str, int]:
        """By model with requests, the tier rank of the most urgent one."""
        ranks: dict[str, int] = {}
        for sequence in self._engine.requests:
            rank = TIER_RANKS[sequence.request.tier]
            ranks[sequence.model] = min(rank, ranks.get(sequence.model, rank))
        return ranks

    def _kept(self, busy: Collection[str]) -> frozenset[str]:
        """Models that offload no more layers while a model with requests is not on the device: models without requests,
        which are to be evicted for it; and models that, if KV in their layers kept them on the device, would leave it
        no memory while another runs.
        """
        memory = self._memory
        here = [name for name in busy if memory.holds(self._models[name])]
        missing = [self._models[name] for name in busy if name not in here]
        if not missing:
            return frozenset()
        kept = set(self._models).difference(here)
        stay = set(memory.offloaded)
        for name in here:
            if all(memory.fits_with(model, others={*stay, name, runs}) for model in missing for runs in here):
                stay.add(name)
            else:
                kept.add(name)
        return frozenset(kept)

    def facts(self, shortage: Shortage, wait_s: float | None) -> PressureFacts:
        """The facts for `choose_action`. `wait_s`: what `remap_wait_s` is."""
        asking, kv = self._models[shortage.sequence.model], shortage.sequence.kv
        turn = self._engine.state.turn
        running = asking if turn is None else self._models.get(turn.model, asking)
        batch = running.decoding[: self._settings.batch_max]
        step_s = running.estimate.decode_s(sum(sequence.cached for sequence in batch), max(len(batch), 1))
        out_bytes_per_s, in_bytes_per_s = self._kv.link_bytes_per_s(kv)
        ends = [
            model.tokens_to_come(sequence)
            for model in self._models.values()
            for sequence in model.decoding
            if sequence.kv.location in (KvLocation.DEVICE, KvLocation.SWAPPING_IN)  # the others wait for memory too
        ]
        return PressureFacts(
            remap_wait_s=wait_s,
            victim=None if shortage.victim is None else self._victim(shortage.victim),
            can_wait=kv.location is KvLocation.NONE and self._may_refuse(shortage),
            running=len(batch),
            step_s=step_s,
            frees_in_s=min(ends) * step_s if ends else inf,
            out_bytes_per_s=out_bytes_per_s,
            in_bytes_per_s=in_bytes_per_s,
            link_wait_s=self._kv.swap_out_wait_s,
        )

    def _may_refuse(self, shortage: Shortage) -> bool:
        """Whether the requester may wait. If there is a victim, only if forced: the order of service decides who waits,
        and the cost, which counts all requests alike, would let a model's first token wait for another's last.
        """
        return shortage.victim is None or self._forced == "refuse"

    def _victim(self, sequence: TokenSequence[Any]) -> Victim:
        model, cached = self._models[sequence.model], sequence.cached
        steps = -(-cached // self._settings.prefill_tokens_per_step_max)
        return Victim(
            kv_bytes=sequence.kv.size_bytes,
            idle_s=idle_s(self._engine.state.round, sequence.model, self._clock()),
            recompute_s=steps * model.estimate.prefill_s(cached // steps, cached**2 // steps) if steps else 0.0,
            fits_host=self._kv.host_fits(sequence.kv, cached),
        )

    def _apply(self, decision: RemapDecision) -> bool:
        """Offload and reclaim layers; whether one was offloaded. Layers whose memory KV has not left are decided on
        again before the next step.
        """
        facts = {model.model: model for model in self._model_facts()}
        offloaded_layers = 0
        for name, wanted in decision.rotations.items():
            model, offloaded = self._models[name], facts[name].offloaded
            more = wanted.offloaded - offloaded
            if more > 0:
                self._memory.rotate(model, wanted)
                offloaded_layers += more
            elif reclaimed := self._memory.reclaim(model, -more):
                self._memory.rotate(model, rotation_of(facts[name], offloaded - reclaimed, self._settings.remap))
                self.layers_moved["reclaimed"] += reclaimed
        self.layers_moved["offloaded"] += offloaded_layers
        return offloaded_layers > 0
