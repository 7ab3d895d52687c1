"""The way out when a slot has no room for KV, and back: gather facts, ask the pure policies, apply (Oneiros 5).

The same for every engine whose models can lend layers; each tells of its memory through `SlotMemory` and `ShortKv`.
Called between the steps of models only: no layer is in use when its place goes to KV or comes back.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from dataplane.engines.core.kv import KvLocation, KvT_contra
from dataplane.engines.core.pressure import KvPressure, Shortage
from dataplane.engines.core.remapping.caps import ModelFacts, rotation_of, wait_s
from dataplane.engines.core.remapping.circle import Rotation
from dataplane.engines.core.remapping.control import RemapDecision, RemapFacts, RemapState, choose_remap
from dataplane.engines.core.remapping.relief import ReliefFacts, ReliefSettings, Victim, Way, choose_relief
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.core.sequences import TokenSequence
from dataplane.engines.core.served_models import ServedModel
from dataplane.engines.core.slot_engine import ModelT, SlotSettings
from dataplane.scheduling.decode import idle_s
from dataplane.scheduling.schedule import SlotState
from dataplane.scheduling.tiers import TIER_RANKS


class PressureSettings(SlotSettings, Protocol):
    """What the settings of such an engine have; see `TorchEngineSettings`."""

    @property
    def kv_pressure(self) -> KvPressure:
        """What is done when KV has no room."""

    @property
    def remap(self) -> RemapSettings:
        """Which layers models give up then."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a model that can give some up: `count` of them, all alike. KV gains `size_bytes` by each; the rest
    is as in `ModelFacts`.
    """

    count: int
    size_bytes: int
    load_s: float
    compute_s: float | None
    used_s: float


ModelT_contra = TypeVar("ModelT_contra", bound=ServedModel, contravariant=True)  # type: ignore[type-arg]


class ShortKv(Protocol[KvT_contra]):
    """KV memory that tells by how much it is too small, and what else could be done."""

    @property
    def swap_out_wait_s(self) -> float:
        """Estimated seconds until what is on its way to host memory is there."""

    def lacks_bytes(self, kv: KvT_contra, tokens: int) -> int:
        """Bytes that device memory lacks for the KV of so many tokens, or for KV on the HOST; 0 if it is free."""

    def host_fits(self, kv: KvT_contra, tokens: int) -> bool:
        """Whether host memory has room for the KV of so many tokens."""


class SlotMemory(Protocol[ModelT_contra, KvT_contra]):
    """The weights and the KV of a slot, as far as the one can lend to the other."""

    @property
    def given_up(self) -> Mapping[str, int]:
        """How many layers' places KV has, by model; those that have given up none are not in it."""

    @property
    def free_bytes(self) -> int:
        """KV memory that is free, in pieces that a layer can have."""

    def out_bytes_per_s(self, kv: KvT_contra) -> float:
        """How fast KV goes to host memory."""

    def in_bytes_per_s(self, kv: KvT_contra) -> float:
        """How fast it comes back."""

    def layers(self, model: ModelT_contra, *, decoding: bool) -> Layers | None:
        """Of a model whose weights are there and still; None if it can give up no layers. `decoding`: what it computes
        is a decode step of its batch, else a usual prefill.
        """

    def holds(self, model: ModelT_contra) -> bool:
        """Whether a model is there or arriving."""

    def has_place(self, model: ModelT_contra, *, beside: Collection[str]) -> bool:
        """Whether a model that is away could come in, to run, while these and all KV stay."""

    def rotate(self, model: ModelT_contra, rotation: Rotation) -> None:
        """Lend as many places as the rotation gives up, at least as many as now; its layers share the others."""

    def take_back(self, model: ModelT_contra, count: int) -> int:
        """End the loan of at most `count` places, those that KV has left; of how many. `rotate` must follow."""


class KvRelief(Generic[ModelT, KvT_contra]):
    """Relieves the KV of one slot. `models` are the slot's, by name; `requests` those that run or wait; `turns()` is
    what the turn policy remembers. How often each of the `ways` was taken, the `refusals` of remapping by reason, and
    the `layers` lent and taken back are counted from the start.
    """

    def __init__(
        self,
        settings: PressureSettings,
        models: Mapping[str, ModelT],
        memory: SlotMemory[ModelT, KvT_contra],
        kv: ShortKv[KvT_contra],
        clock: Callable[[], float],
        *,
        requests: Iterable[TokenSequence[Any]],
        turns: Callable[[], SlotState],
    ) -> None:
        self._settings = settings
        self._models = models
        self._memory = memory
        self._kv = kv
        self._clock = clock
        self._requests = requests
        self._turns = turns
        self._relief = ReliefSettings(forced=None if settings.kv_pressure == "auto" else settings.kv_pressure)
        self._state = RemapState()
        self.ways: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.layers: Counter[str] = Counter()

    def relieve(self, shortage: Shortage) -> Way | None:
        """See `Relieve`: choose the way; for "remap", lend the layers."""
        decision, wait_s = self._choose_remap(shortage)
        relief = choose_relief(self._relief_facts(shortage, wait_s), self._relief)
        way = None if relief is None else relief.way
        if way == "remap" and decision is not None and not self._apply(decision):
            way = "swap"
        self.ways[way or "wait"] += 1
        return way

    def revert(self) -> tuple[str, ...]:
        """Give layers back whose memory KV has left, if the policy says so; before a step. Returns the active models
        that wait for layers they cannot get back: KV had better leave the place of one.
        """
        if not self._memory.given_up:
            return ()
        facts = RemapFacts(models=self._model_facts(), free_bytes=self._memory.free_bytes)
        decision, self._state = choose_remap(facts, self._state, self._clock(), self._settings.remap)
        self._apply(decision)
        active = {model.model for model in facts.models if model.active}
        return tuple(name for name in decision.over if name in active)

    def _choose_remap(self, shortage: Shortage) -> tuple[RemapDecision | None, float | None]:
        """What would be given up, and for how long a step of an active model would wait then; None: too little."""
        if self._settings.kv_pressure not in ("auto", "remap"):
            return None, None
        models = self._model_facts()
        lacks_bytes = self._kv.lacks_bytes(shortage.sequence.kv, shortage.tokens)
        facts = RemapFacts(models=models, short_bytes=lacks_bytes)
        decision, self._state = choose_remap(facts, self._state, self._clock(), self._settings.remap)
        if decision.missing_bytes or not decision.deepened_layers:
            self.refusals.update(decision.capped.values() if models else ["no model"])
            return None, None
        giving = (model for model in models if model.active and model.model in decision.rotations)
        return decision, max((wait_s(model, decision.rotations[model.model]) for model in giving), default=0.0)

    def _model_facts(self) -> tuple[ModelFacts, ...]:
        """Of the models that are there, whole or not, and whose layers are alike.

        Active: it runs or decodes, also while another has its turn, for its own turn will be one of decoding: where
        models take turns token by token, temporal sharing is as spatial sharing to it. The others are inactive.
        Priority: by the most urgent of its requests, and the next to run above its equals; without any, the least.
        """
        given_up, turn, ranks = self._memory.given_up, self._turns().turn, self._ranks()
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
                    given_up=given_up.get(name, 0),
                    priority=2 * (len(TIER_RANKS) - ranks[name]) + is_next if name in ranks else 0,
                    kept=name in kept,
                    used_s=layers.used_s,
                )
            )
        return tuple(facts)

    def _ranks(self) -> dict[str, int]:
        """Of each model with requests, the rank of the most urgent one's tier."""
        ranks: dict[str, int] = {}
        for sequence in self._requests:
            rank = TIER_RANKS[sequence.request.tier]
            ranks[sequence.model] = min(rank, ranks.get(sequence.model, rank))
        return ranks

    def _kept(self, busy: Collection[str]) -> frozenset[str]:
        """Models that give up no more, while one that has requests is away: those without requests, which make room for
        it; and those beside which, were they to stay for the KV in their layers, it had no place while another runs.
        """
        memory = self._memory
        here = [name for name in busy if memory.holds(self._models[name])]
        away = [self._models[name] for name in busy if name not in here]
        if not away:
            return frozenset()
        kept = set(self._models).difference(here)
        stay = set(memory.given_up)
        for name in here:
            if all(memory.has_place(model, beside={*stay, name, runs}) for model in away for runs in here):
                stay.add(name)
            else:
                kept.add(name)
        return frozenset(kept)

    def _relief_facts(self, shortage: Shortage, wait_s: float | None) -> ReliefFacts:
        asking, kv = self._models[shortage.sequence.model], shortage.sequence.kv
        turn = self._turns().turn
        running = asking if turn is None else self._models.get(turn.model, asking)
        batch = running.decoding[: self._settings.batch_max]
        step_s = running.estimate.decode_s(sum(sequence.cached for sequence in batch), max(len(batch), 1))
        ends = [sequence.remaining_tokens for model in self._models.values() for sequence in model.decoding]
        return ReliefFacts(
            remap_wait_s=wait_s,
            victim=None if shortage.victim is None else self._victim(shortage.victim),
            can_wait=kv.location is KvLocation.NONE and bool(ends) and self._may_refuse(shortage),
            running=len(batch),
            step_s=step_s,
            room_s=min(ends) * step_s if ends else inf,
            out_bytes_per_s=self._memory.out_bytes_per_s(kv),
            in_bytes_per_s=self._memory.in_bytes_per_s(kv),
            wire_wait_s=self._kv.swap_out_wait_s,
        )

    def _may_refuse(self, shortage: Shortage) -> bool:
        """Whether who asks may wait. The order of service says who does: where others have to make way, only if forced,
        for the cost counts all requests alike and so would let a model's first token wait for another's last.
        """
        return shortage.victim is None or self._relief.forced == "refuse"

    def _victim(self, sequence: TokenSequence[Any]) -> Victim:
        model, cached = self._models[sequence.model], sequence.cached
        steps = -(-cached // self._settings.prefill_tokens_per_step_max)
        return Victim(
            kv_bytes=sequence.kv.size_bytes,
            idle_s=idle_s(self._turns().round, sequence.model, self._clock()),
            recompute_s=steps * model.estimate.prefill_s(cached // steps, cached**2 // steps) if steps else 0.0,
            host_room=self._kv.host_fits(sequence.kv, cached),
        )

    def _apply(self, decision: RemapDecision) -> bool:
        """Lend and take back; whether a layer was lent. What KV has not left is not taken back, and asked for anew
        before the next step.
        """
        facts = {model.model: model for model in self._model_facts()}
        lent = 0
        for name, wanted in decision.rotations.items():
            model, given_up = self._models[name], facts[name].given_up
            more = wanted.given_up - given_up
            if more > 0:
                self._memory.rotate(model, wanted)
                lent += more
            elif taken := self._memory.take_back(model, -more):
                self._memory.rotate(model, rotation_of(facts[name], given_up - taken, self._settings.remap))
                self.layers["taken back"] += taken
        self.layers["lent"] += lent
        return lent > 0
