"""How many layers a model may give up (Oneiros 5.3): as many as can be loaded while it computes, as measured. Pure.

What it computes meanwhile is, for a model that decodes, one step; for an inactive one, the prefill it will begin with,
which takes longer, so that it can give up more. When it becomes active it has to get back what its steps do not hide.
"""

from dataclasses import dataclass
from typing import Literal

from dataplane.engines.core.remapping.circle import (
    Circle,
    Rotation,
    choose_rotation,
    deepest,
    is_hidden,
    least_waiting,
    step_s,
)
from dataplane.engines.core.remapping.settings import RemapSettings

Reason = Literal["unmeasured", "not hidden", "share_max", "layers", "switching"]
"""What keeps a model from giving up more: its times are not known, its loads would not be hidden, the setting, that of
one layer's frame at least must stay, or that its place is kept for another model, which is to come in.
"""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model whose weights are on the slot. Layers are alike: `layer_bytes` each, `load_s` to load one (T_T).

    `given_up`: of how many layers KV has the memory now (alpha). `active`: it decodes now: the running model where
    models take turns, every model with requests where they share the slot. `compute_s`: measured time in its layers, of
    a decode step with the batch it has now if active, else of a usual prefill; None when not known. `priority`: the
    lower ones give up first. `used_s`: when it was last made active, on any clock that only grows. `kept`: it is to
    give up no more, since another model may need its whole place.
    """

    model: str
    layers: int
    layer_bytes: int
    load_s: float
    compute_s: float | None
    active: bool
    offloaded: int = 0
    priority: int = 0
    used_s: float = 0.0
    kept: bool = False

    def __post_init__(self) -> None:
        """Hold that something of the model is there."""
        assert 0 <= self.offloaded < self.layers, (self.offloaded, self.layers)
        assert self.layer_bytes > 0, self.layer_bytes
        assert self.load_s > 0, self.load_s
        assert self.compute_s is None or self.compute_s > 0, self.compute_s

    @property
    def offloaded_bytes(self) -> int:
        """What KV has of its memory."""
        return self.offloaded * self.layer_bytes


@dataclass(frozen=True, kw_only=True)
class Cap:
    """`layers`: that the model may give up at most; `reason`: why not more."""

    layers: int
    reason: Reason


def circle_of(facts: ModelFacts, settings: RemapSettings) -> Circle | None:
    """Its circle, the margin in the loads; None when its compute time is not known."""
    if facts.compute_s is None:
        return None
    return Circle(
        layers=facts.layers,
        load_s=facts.load_s * (1 + settings.margin),
        compute_s=facts.compute_s / facts.layers,
    )


def wait_s(facts: ModelFacts, rotation: Rotation) -> float:
    """What a step of the model would wait for loads, by the times as measured; 0 when they are hidden or not known."""
    circle = circle_of(facts, RemapSettings(margin=0.0))
    if circle is None or is_hidden(circle, rotation):
        return 0.0
    return step_s(circle, rotation) - circle.layers * circle.compute_s


def choose_cap(facts: ModelFacts, settings: RemapSettings) -> Cap:
    """How many layers the model may give up, and why not more. Never all: one frame at least stays."""
    circle = circle_of(facts, settings)
    if circle is None:
        return Cap(layers=0, reason="unmeasured")
    limits: dict[Reason, int] = {
        "share_max": int(settings.share_max * facts.layers),
        "layers": facts.layers - settings.frames_min,
    }
    if settings.capped:
        limits["not hidden"] = deepest(circle, frames_min=settings.frames_min, frames_max=settings.frames_max)
    if facts.kept and facts.offloaded < min(limits.values()):
        return Cap(layers=facts.offloaded, reason="switching")
    reason = min(limits, key=lambda reason: (limits[reason], reason))
    return Cap(layers=max(limits[reason], 0), reason=reason)


def rotation_of(facts: ModelFacts, offloaded: int, settings: RemapSettings) -> Rotation:
    """Which layers of the model rotate while it gives up so many: the fewest that hide their loads, or, where none
    does, those that wait least.
    """
    circle = circle_of(facts, settings)
    if circle is None:
        most = facts.layers - offloaded
        return Rotation(
            layers=facts.layers, offloaded=offloaded, frames=min(settings.frames_min, most) if offloaded else 0
        )
    hidden = choose_rotation(circle, offloaded, frames_min=settings.frames_min, frames_max=settings.frames_max)
    return hidden or least_waiting(circle, offloaded, frames_min=settings.frames_min, frames_max=settings.frames_max)
