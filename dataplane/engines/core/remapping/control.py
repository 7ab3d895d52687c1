"""When layers are offloaded for KV, when they are reclaimed, and whose (Oneiros 5.1, 5.2, algorithm 1). Pure.

    deepen  An allocation failed: layers are offloaded, one at a time, until they cover what was missing: of inactive
            models first, the lowest priority first, then the most recently used, each down to its cap; then of active
            models, each time of the one with the smallest offloaded share (round robin).
    move    A layer of an active model is offloaded while one of an inactive model could be instead: they swap roles,
            once for each layer.
    revert  KV does not use a layer's memory: it is reclaimed, in the reverse order. `spare_layers` more must stay free
            and `settle_s` have passed, or the next allocation would take it again; a model with more offloaded layers
            than it can hide now, for instance because few requests are left, waits for neither.

Nothing is offloaded that would make a model slower; if that leaves too little, the decision says by how much and why,
and the caller handles the pressure by another action (`actions`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataplane.engines.core.remapping.caps import Cap, ModelFacts, Reason, choose_cap, rotation_of
from dataplane.engines.core.remapping.circle import Rotation
from dataplane.engines.core.remapping.settings import RemapSettings


@dataclass(frozen=True, kw_only=True)
class RemapFacts:
    """A slot's weights and KV memory at one moment. `models`: those whose weights are on it, each once.

    `short_bytes`: what an allocation of KV lacked beyond all free memory; 0: none failed. `free_bytes`: KV memory that
    is free in pieces of a layer's memory (whole slabs), offloaded layers included; not read if one failed.
    """

    models: tuple[ModelFacts, ...]
    short_bytes: int = 0
    free_bytes: int = 0

    def __post_init__(self) -> None:
        assert len({model.model for model in self.models}) == len(self.models)
        assert self.short_bytes >= 0, self.short_bytes
        assert self.free_bytes >= 0, self.free_bytes


@dataclass(frozen=True, kw_only=True)
class RemapState:
    """State between two decisions. `pressed_s`: when an allocation last failed."""

    pressed_s: float = float("-inf")


@dataclass(frozen=True, kw_only=True)
class RemapDecision:
    """`rotations`: of the models whose offloaded layers change, by name.

    `missing_bytes`: what no model could cover; `capped`: if there are any, why each model did not offload more. `over`:
    models with more offloaded layers than they can hide, which cannot be reclaimed now; while such a model is active
    its steps wait, and KV should be evicted.
    """

    rotations: Mapping[str, Rotation] = field(default_factory=dict)
    missing_bytes: int = 0
    capped: Mapping[str, Reason] = field(default_factory=dict)
    over: tuple[str, ...] = ()


def choose_remap(
    facts: RemapFacts, state: RemapState, now_s: float, settings: RemapSettings
) -> tuple[RemapDecision, RemapState]:
    """What changes now. Called when an allocation of KV fails, and between steps while layers are offloaded."""
    offloads = _Offloads(facts, settings)
    before = dict(offloads.offloaded)
    missing_bytes = offloads.deepen(facts.short_bytes)
    offloads.move()
    if not facts.short_bytes:
        offloads.revert(settled=now_s - state.pressed_s >= settings.settle_s)
    decision = RemapDecision(
        rotations={
            model.model: rotation_of(model, offloads.offloaded[model.model], settings)
            for model in facts.models
            if offloads.offloaded[model.model] != before[model.model]
        },
        missing_bytes=missing_bytes,
        capped={name: cap.reason for name, cap in offloads.caps.items()} if missing_bytes else {},
        over=tuple(model.model for model in facts.models if offloads.is_over(model)),
    )
    return decision, RemapState(pressed_s=now_s) if facts.short_bytes else state


class _Offloads:
    """How many layers of each model are offloaded, while it is decided. Names break ties."""

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

    def is_over(self, model: ModelFacts) -> bool:
        """Whether more layers are offloaded than it can hide."""
        return self.offloaded[model.model] > self.caps[model.model].layers

    def deepen(self, short_bytes: int) -> int:
        """Offload layers for so many bytes; returns the bytes still missing."""
        while short_bytes > 0 and (model := self._next_inactive() or self._next_active()):
            self.offloaded[model.model] += 1
            short_bytes -= model.layer_bytes
        self._free_bytes += max(-short_bytes, 0)
        return max(short_bytes, 0)

    def move(self) -> None:
        """Offload layers of inactive models in place of active ones'."""
        for active in sorted(self._active, key=self._share, reverse=True):
            while self.offloaded[active.model] and self._take_from_inactive(active.layer_bytes):
                self.offloaded[active.model] -= 1

    def revert(self, *, settled: bool) -> None:
        """Reclaim what KV does not need. Not `settled`: only where loads are not hidden."""
        if not self._settings.reverts:
            return
        for over in (model for model in (*self._active, *self._inactive) if self.is_over(model)):
            while self.is_over(over) and self._reclaim(over, spare_layers=0):
                pass
        if settled:
            while (model := self._last_offloaded()) and self._reclaim(model, spare_layers=self._settings.spare_layers):
                pass

    def _take_from_inactive(self, size_bytes: int) -> bool:
        """Offload so many bytes of inactive models, all or none, less what is free: that was offloaded for the same
        purpose before, and KV has yet to leave the other model's memory for it. The remainder becomes free.
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

    def _reclaim(self, model: ModelFacts, *, spare_layers: float) -> bool:
        if self._free_bytes < model.layer_bytes * (1 + spare_layers):
            return False
        self.offloaded[model.model] -= 1
        self._free_bytes -= model.layer_bytes
        return True

    def _next_inactive(self) -> ModelFacts | None:
        return next((model for model in self._inactive if self._may_offload(model)), None)

    def _next_active(self) -> ModelFacts | None:
        return min((model for model in self._active if self._may_offload(model)), key=self._share, default=None)

    def _last_offloaded(self) -> ModelFacts | None:
        """The model whose layer was offloaded last: the active one with the largest share, else an inactive one."""
        active = [model for model in reversed(self._active) if self.offloaded[model.model]]
        if active:
            return max(active, key=self._share)
        return next((model for model in reversed(self._inactive) if self.offloaded[model.model]), None)

    def _may_offload(self, model: ModelFacts) -> bool:
        return self.offloaded[model.model] < self.caps[model.model].layers

    def _share(self, model: ModelFacts) -> float:
        return self.offloaded[model.model] / model.layers
