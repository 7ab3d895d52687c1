"""When layers are given up to KV, when they come back, and whose (Oneiros 5.1, 5.2, algorithm 1). Pure.

    deepen  an allocation failed: layers go, one at a time, until what was missing is covered: of inactive models first,
            the lowest priority first, of those equal the most recently used first, each down to its cap; then of
            active models, each time of the one that has given up the least share (round robin).
    move    an active model has given up a layer while an inactive one could instead: so it does, once for each layer.
    revert  KV has a layer's memory free: it goes back, in the reverse order. `spare_layers` more must stay free and
            `settle_s` have passed, lest the next allocation take it again; a model that has given up more than it can
            hide now, as when few requests are left, waits for neither.

Nothing is given up that would make a model slower; where that leaves too little, the caller is told by how much and
why, and finds room otherwise (`relief`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataplane.engines.core.remapping.caps import Cap, ModelFacts, Reason, choose_cap, rotation_of
from dataplane.engines.core.remapping.circle import Rotation
from dataplane.engines.core.remapping.settings import RemapSettings


@dataclass(frozen=True, kw_only=True)
class RemapFacts:
    """A slot's weights and KV memory at one moment. `models`: those whose weights are on it, each once.

    `short_bytes`: what an allocation of KV was short of, after all that is free; 0: none failed. `free_bytes`: of KV
    memory in pieces that a layer can have (whole slabs), given-up layers included; it is not read when one failed.
    """

    models: tuple[ModelFacts, ...]
    short_bytes: int = 0
    free_bytes: int = 0

    def __post_init__(self) -> None:
        """Hold that each model is there once."""
        assert len({model.model for model in self.models}) == len(self.models)
        assert self.short_bytes >= 0, self.short_bytes
        assert self.free_bytes >= 0, self.free_bytes


@dataclass(frozen=True, kw_only=True)
class RemapState:
    """What a slot remembers from one choice to the next. `pressed_s`: when an allocation last failed."""

    pressed_s: float = float("-inf")


@dataclass(frozen=True, kw_only=True)
class RemapDecision:
    """`rotations`: of the models that give up more or less than before, by name; the others stay as they are.

    `missing_bytes`: of what was short, what no model could give; `capped`: then, why each did not give more.
    `over`: models that have given up more than they can hide and cannot get it back now; while such a one is active
    its steps wait, and KV had better leave. The counts are of layers, for metrics.
    """

    rotations: Mapping[str, Rotation] = field(default_factory=dict)
    missing_bytes: int = 0
    capped: Mapping[str, Reason] = field(default_factory=dict)
    over: tuple[str, ...] = ()
    deepened_layers: int = 0
    moved_layers: int = 0
    reverted_layers: int = 0


def choose_remap(
    facts: RemapFacts, state: RemapState, now_s: float, settings: RemapSettings
) -> tuple[RemapDecision, RemapState]:
    """What changes now. Called when an allocation of KV fails, and between steps while something is given up."""
    loans = _Loans(facts, settings)
    before = dict(loans.offloaded)
    missing_bytes = loans.deepen(facts.short_bytes)
    deepened_layers = loans.total - sum(before.values())
    moved_layers = loans.move()
    reverted_layers = 0
    if not facts.short_bytes:
        reverted_layers = loans.revert(settled=now_s - state.pressed_s >= settings.settle_s)
    decision = RemapDecision(
        rotations={
            model.model: rotation_of(model, loans.offloaded[model.model], settings)
            for model in facts.models
            if loans.offloaded[model.model] != before[model.model]
        },
        missing_bytes=missing_bytes,
        capped={name: cap.reason for name, cap in loans.caps.items()} if missing_bytes else {},
        over=tuple(model.model for model in facts.models if loans.is_over(model)),
        deepened_layers=deepened_layers,
        moved_layers=moved_layers,
        reverted_layers=reverted_layers,
    )
    return decision, RemapState(pressed_s=now_s) if facts.short_bytes else state


class _Loans:
    """How many layers each model has given up, while it is decided. Names break ties."""

    def __init__(self, facts: RemapFacts, settings: RemapSettings) -> None:
        self.caps: dict[str, Cap] = {model.model: choose_cap(model, settings) for model in facts.models}
        self.offloaded = {model.model: model.offloaded for model in facts.models}
        self._settings = settings
        self._free_bytes = 0 if facts.short_bytes else facts.free_bytes
        recency = -1 if settings.victims == "mru" else 1
        self._inactive = sorted(
            (model for model in facts.models if not model.active),
            key=lambda model: (model.priority, recency * model.used_s, model.model),
        )
        self._active = sorted((model for model in facts.models if model.active), key=lambda model: model.model)

    @property
    def total(self) -> int:
        """Layers given up, of all models."""
        return sum(self.offloaded.values())

    def is_over(self, model: ModelFacts) -> bool:
        """Whether it has given up more than it can hide."""
        return self.offloaded[model.model] > self.caps[model.model].layers

    def deepen(self, short_bytes: int) -> int:
        """Give up layers for so many bytes; what is still missing then."""
        while short_bytes > 0 and (model := self._next_inactive() or self._next_active()):
            self.offloaded[model.model] += 1
            short_bytes -= model.layer_bytes
        self._free_bytes += max(-short_bytes, 0)
        return max(short_bytes, 0)

    def move(self) -> int:
        """Have inactive models give up what active ones have; how many layers these get back."""
        moved = 0
        for active in sorted(self._active, key=self._share, reverse=True):
            while self.offloaded[active.model] and self._take_from_inactive(active.layer_bytes):
                self.offloaded[active.model] -= 1
                moved += 1
        return moved

    def revert(self, *, settled: bool) -> int:
        """Give back what KV does not need; how many layers. Not `settled`: only where loads are not hidden."""
        if not self._settings.reverts:
            return 0
        before = self.total
        for over in (model for model in (*self._active, *self._inactive) if self.is_over(model)):
            while self.is_over(over) and self._give_back(over, spare_layers=0):
                pass
        if settled:
            while (model := self._last_given()) and self._give_back(model, spare_layers=self._settings.spare_layers):
                pass
        return before - self.total

    def _take_from_inactive(self, size_bytes: int) -> bool:
        """Have inactive models give up so many bytes, all or none, less what is free: they gave that up for the same
        purpose before, and KV has yet to leave the other's place for it. What is over joins what is free.
        """
        offloaded = dict(self.offloaded)
        free_bytes = self._free_bytes if self._settings.reverts and self._next_inactive() else 0
        gained_bytes = 0
        while gained_bytes + free_bytes < size_bytes:
            model = self._next_inactive()
            if model is None:
                self.offloaded = offloaded
                return False
            self.offloaded[model.model] += 1
            gained_bytes += model.layer_bytes
        self._free_bytes += gained_bytes - size_bytes
        return True

    def _give_back(self, model: ModelFacts, *, spare_layers: float) -> bool:
        if self._free_bytes < model.layer_bytes * (1 + spare_layers):
            return False
        self.offloaded[model.model] -= 1
        self._free_bytes -= model.layer_bytes
        return True

    def _next_inactive(self) -> ModelFacts | None:
        return next((model for model in self._inactive if self._has_room(model)), None)

    def _next_active(self) -> ModelFacts | None:
        return min((model for model in self._active if self._has_room(model)), key=self._share, default=None)

    def _last_given(self) -> ModelFacts | None:
        """Whose layer was given up last: of the active the one with the largest share, else of the last inactive."""
        active = [model for model in reversed(self._active) if self.offloaded[model.model]]
        if active:
            return max(active, key=self._share)
        return next((model for model in reversed(self._inactive) if self.offloaded[model.model]), None)

    def _has_room(self, model: ModelFacts) -> bool:
        return self.offloaded[model.model] < self.caps[model.model].layers

    def _share(self, model: ModelFacts) -> float:
        return self.offloaded[model.model] / model.layers
