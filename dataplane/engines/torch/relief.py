"""The way out when the slot has no room for KV, and back: gather facts, ask the pure policies, apply (Oneiros 5).

Called between the forward passes of a step only: no layer is in use when its place goes to KV or comes back.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf

from dataplane.engines.kv import Place
from dataplane.engines.pressure import Shortage
from dataplane.engines.torch.kv import KvStore
from dataplane.engines.torch.pooled import Pooled
from dataplane.engines.torch.sequences import TokenSequence
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.engines.torch.weights import WeightStore
from dataplane.memory.slabs import Run, SlabArena
from dataplane.remapping.caps import ModelFacts, rotation_of, wait_s
from dataplane.remapping.control import RemapDecision, RemapFacts, RemapState, choose_remap
from dataplane.remapping.relief import ReliefFacts, ReliefSettings, Victim, Way, choose_relief
from dataplane.turns.decode import idle_s
from dataplane.turns.schedule import SlotState
from dataplane.turns.tiers import TIER_RANKS


class KvRelief:
    """Relieves the KV of one slot. `models` are the slot's, by name; `requests` those that run or wait; `turns()` is
    what the turn policy remembers. How often each of the `ways` was taken, the `refusals` of remapping by reason, and
    the `layers` lent and taken back are counted from the start.
    """

    def __init__(
        self,
        settings: TorchEngineSettings,
        models: Mapping[str, Pooled],
        weights: WeightStore,
        kv: KvStore,
        arena: SlabArena,
        clock: Callable[[], float],
        *,
        requests: Iterable[TokenSequence],
        turns: Callable[[], SlotState],
    ) -> None:
        self._settings = settings
        self._models = models
        self._weights = weights
        self._kv = kv
        self._arena = arena
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

    def revert(self) -> tuple[Run, ...]:
        """Give layers back whose memory KV has left, if the policy says so; before a step. Returns the slabs that KV
        had better leave: of a layer that an active model lacks and waits for.
        """
        if not self._weights.given_up:
            return ()
        facts = RemapFacts(models=self._model_facts(), free_bytes=self._arena.free_kv_slabs * self._kv.slab_bytes)
        decision, self._state = choose_remap(facts, self._state, self._clock(), self._settings.remap)
        self._apply(decision)
        active = {model.model for model in facts.models if model.active}
        return tuple(self._least_used_place(name) for name in decision.over if name in active)

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
        given_up, turn, ranks = self._weights.given_up, self._turns().turn, self._ranks()
        kept = self._kept(ranks)
        facts = []
        for name, pooled in self._models.items():
            slabs = self._weights.layer_slabs(pooled.weights)
            if slabs is None:
                continue
            active = bool(pooled.decoding) or (turn is not None and name == turn.model)
            is_next = turn is not None and name == turn.next_model
            layer_bytes = pooled.weights.skeleton.parts[1].size_bytes
            facts.append(
                ModelFacts(
                    model=name,
                    layers=pooled.layers,
                    layer_bytes=slabs * self._kv.slab_bytes,
                    load_s=layer_bytes / self._weights.bytes_per_s,
                    compute_s=pooled.layers_compute_s(
                        self._settings.batch_max, decoding=active and bool(pooled.decoding)
                    ),
                    active=active,
                    given_up=given_up.get(name, 0),
                    priority=2 * (len(TIER_RANKS) - ranks[name]) + is_next if name in ranks else 0,
                    kept=name in kept,
                    used_s=self._weights.used_s(pooled.weights),
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
        here = [name for name in busy if self._weights.holds(self._models[name].weights)]
        away = [self._models[name].weights for name in busy if name not in here]
        if not away:
            return frozenset()
        kept = set(self._models).difference(here)
        stay = set(self._weights.given_up)
        for name in here:
            if all(self._weights.has_place(model, beside={*stay, name, runs}) for model in away for runs in here):
                stay.add(name)
            else:
                kept.add(name)
        return frozenset(kept)

    def _relief_facts(self, shortage: Shortage, wait_s: float | None) -> ReliefFacts:
        asking = self._models[shortage.sequence.model]
        turn = self._turns().turn
        running = asking if turn is None else self._models.get(turn.model, asking)
        batch = running.decoding[: self._settings.batch_max]
        step_s = running.estimate.decode_s(sum(sequence.cached for sequence in batch), max(len(batch), 1))
        ends = [sequence.remaining_tokens for model in self._models.values() for sequence in model.decoding]
        return ReliefFacts(
            remap_wait_s=wait_s,
            victim=None if shortage.victim is None else self._victim(shortage.victim),
            can_wait=shortage.sequence.kv.place is Place.NOWHERE and bool(ends) and self._may_refuse(shortage),
            running=len(batch),
            step_s=step_s,
            room_s=min(ends) * step_s if ends else inf,
            out_bytes_per_s=self._kv.out_bytes_per_s,
            in_bytes_per_s=self._kv.in_bytes_per_s,
            wire_wait_s=self._kv.leaving_s,
        )

    def _may_refuse(self, shortage: Shortage) -> bool:
        """Whether who asks may wait. The order of service says who does: where others have to make way, only if forced,
        for the cost counts all requests alike and so would let a model's first token wait for another's last.
        """
        return shortage.victim is None or self._relief.forced == "refuse"

    def _victim(self, sequence: TokenSequence) -> Victim:
        pooled, cached = self._models[sequence.model], sequence.cached
        steps = -(-cached // self._settings.prefill_tokens_per_step_max)
        return Victim(
            kv_bytes=sequence.kv.size_bytes,
            idle_s=idle_s(self._turns().round, sequence.model, self._clock()),
            recompute_s=steps * pooled.estimate.prefill_s(cached // steps, cached**2 // steps) if steps else 0.0,
            host_room=self._kv.host_fits(sequence.kv, cached),
        )

    def _apply(self, decision: RemapDecision) -> bool:
        """Lend and take back; whether a layer was lent. What KV has not left is not taken back, and asked for anew
        before the next step.
        """
        facts = {model.model: model for model in self._model_facts()}
        lent = 0
        for name, wanted in decision.rotations.items():
            layers = self._weights.remapped(self._models[name].weights)
            more = wanted.given_up - layers.given_up
            if more > 0:
                layers.rotate(wanted)
                lent += more
            elif taken := layers.take_back(-more):
                layers.rotate(rotation_of(facts[name], layers.given_up, self._settings.remap))
                self.layers["taken back"] += taken
        self.layers["lent"] += lent
        return lent > 0

    def _least_used_place(self, name: str) -> Run:
        """Of the places that a model has lent, the one that the fewest sequences have KV in."""
        places = self._weights.remapped(self._models[name].weights).lent_places
        held = [sequence.kv for model in self._models.values() for sequence in model.begun]
        return min(places, key=lambda place: sum(self._kv.lies_in(kv, place.slabs) for kv in held))
