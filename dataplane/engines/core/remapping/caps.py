"""How many layers of a model may be offloaded (Oneiros 5.3): as many as can be loaded while it computes, as measured.
Pure.

A model that decodes computes one step meanwhile; an inactive one computes the prefill it will begin with, which takes
longer, so that more of its layers can be offloaded. When it becomes active, layers whose loads its steps do not hide
must be reclaimed.
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
"""Why no more layers of a model are offloaded: its times are unknown, their loads would not be hidden, the setting, one
layer's frame at least must stay, or its region is kept for another model that is to be loaded.
"""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model whose weights are on the slot. Its layers are equal: `layer_bytes` each, `load_s` to load one (T_T).

    `offloaded`: how many layers are offloaded (alpha). `active`: it decodes now: the running model if models take
    turns, every model with requests if they share the slot. `compute_s`: measured seconds in its layers, of a decode
    step with the present batch if active, else of a usual prefill; None if unknown. `priority`: lower ones are
    offloaded first. `used_s`: when it was last made active, on any clock that only grows. `kept`: no more of it may be
    offloaded, because another model may need its whole region.
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
        assert 0 <= self.offloaded < self.layers, (self.offloaded, self.layers)
        assert self.layer_bytes > 0, self.layer_bytes
        assert self.load_s > 0, self.load_s
        assert self.compute_s is None or self.compute_s > 0, self.compute_s


@dataclass(frozen=True, kw_only=True)
class Cap:
    """`layers`: how many may be offloaded; `reason`: why no more."""

    layers: int
    reason: Reason


def circle_of(facts: ModelFacts, settings: RemapSettings) -> Circle | None:
    """Its circle, with the margin added to load times; None if its compute time is unknown."""
    if facts.compute_s is None:
        return None
    return Circle(
        layers=facts.layers,
        load_s=facts.load_s * (1 + settings.margin),
        compute_s=facts.compute_s / facts.layers,
    )


def wait_s(facts: ModelFacts, rotation: Rotation) -> float:
    """Seconds that a step of the model would wait for loads, by measured times; 0 if hidden or unknown."""
    circle = circle_of(facts, RemapSettings(margin=0.0))
    if circle is None or is_hidden(circle, rotation):
        return 0.0
    return step_s(circle, rotation) - circle.layers * circle.compute_s


def choose_cap(facts: ModelFacts, settings: RemapSettings) -> Cap:
    """How many layers may be offloaded, and why no more. Never all: one frame at least stays."""
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
    """Which layers of the model rotate while so many are offloaded: the fewest whose loads are hidden, or, if none are,
    those that wait least.
    """
    circle = circle_of(facts, settings)
    if circle is None:
        most = facts.layers - offloaded
        return Rotation(
            layers=facts.layers, offloaded=offloaded, frames=min(settings.frames_min, most) if offloaded else 0
        )
    hidden = choose_rotation(circle, offloaded, frames_min=settings.frames_min, frames_max=settings.frames_max)
    return hidden or least_waiting(circle, offloaded, frames_min=settings.frames_min, frames_max=settings.frames_max)
