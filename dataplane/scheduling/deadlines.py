"""Time slices by deadlines: which model of a slot runs, and until when. Pure.

Each model has one due time: the latest moment at which it must run again, so that its most urgent next token, of a
waiting prompt or of its batch, is made in time. A slice serves a model's prompts and its batch alike, so that neither
costs a switch of its own.

The running model goes on for as long as all others, each in its turn by due time and with a minimal slice for every one
before it, can still begin in time: earliest deadline first, as late as possible. A batch decodes several times faster
than its tokens are due, so that a long slice makes tokens which last through the slices of others. A slot thus switches
only where that saves a deadline, and later requests of a model find its batch still there.

A slice lasts at least as long as the longest load of any model with work, within the limits of a quota. So the next
model is loaded while it runs, and however late all models are, switches take no more of the time than steps do.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from dataplane.scheduling.decode import DecodeSettings

TimeSlices = Literal["rounds", "deadlines"]
"""How a slot divides its time among models: `rounds` of quotas (`decode.py`), or slices by deadlines."""


class ModelWork(Struct, frozen=True, kw_only=True):
    """A model with something to run. `due_s`: when its next step must begin, by the clock. `missing_s`: seconds until
    its weights would be loaded, if that began now; `load_s`: how long the whole load takes.
    """

    model: str
    due_s: float
    missing_s: float = 0.0
    load_s: float = 0.0


class SliceState(Struct, frozen=True, kw_only=True):
    """The present slice. `began_s`: when its model was loaded; `ends_s`: when another model has to run, infinite if no
    other has work. `stuck`: models that could not run since the last slice that did; the others are tried first.
    """

    model: str | None = None
    began_s: float = 0.0
    ends_s: float = 0.0
    stuck: frozenset[str] = frozenset()

    def cut_short(self) -> "SliceState":
        """The state after a step of a model that could not run."""
        return self if self.model is None else replace(self, stuck=self.stuck | {self.model})


class SliceChoice(Struct, frozen=True, kw_only=True):
    """The model to run and `following`, all others with work in their order, of which each gets at least `slice_s`."""

    model: str
    following: tuple[str, ...]
    slice_s: float
    reason: str


def choose_slice(
    work: Sequence[ModelWork], state: SliceState, now_s: float, *, near_s: float, settings: DecodeSettings
) -> tuple[SliceChoice, SliceState]:
    """The model to run now. `work`: of different models, at least one; `near_s`: how much earlier than at the latest
    moment a model begins. Called before every step.
    """
    assert work
    stuck = state.stuck
    if all([one.model in stuck for one in work]):
        stuck = frozenset()
    present = next((one for one in work if one.model == state.model and one.model not in stuck), None)
    if present is None and state.model not in stuck:
        stuck = frozenset()
    slice_s = min(max([settings.quota_min_s, *[one.load_s for one in work]]), settings.quota_max_s)
    began_s, reason = state.began_s, "its slice is not over"
    if present is not None:
        if present.missing_s:
            began_s = now_s + present.missing_s
        others = _by_due(work, present)
        ends_s = _ends_s(others, began_s, slice_s, near_s)
        if now_s >= ends_s:
            present, stuck = None, frozenset()
    if present is None:
        candidates = sorted(work, key=lambda one: (one.model in stuck or one.model == state.model, one.due_s))
        present, reason = candidates[0], "first to be due"
        began_s = now_s + present.missing_s
        others = _by_due(work, present)
        ends_s = _ends_s(others, began_s, slice_s, near_s)
    following = tuple([one.model for one in others])
    choice = SliceChoice(model=present.model, following=following, slice_s=slice_s, reason=reason)
    return choice, SliceState(model=present.model, began_s=began_s, ends_s=ends_s, stuck=stuck)


def _by_due(work: Sequence[ModelWork], present: ModelWork) -> list[ModelWork]:
    return sorted([one for one in work if one is not present], key=lambda one: one.due_s)


def _ends_s(others: Sequence[ModelWork], began_s: float, slice_s: float, near_s: float) -> float:
    """When a slice ends: as late as all others can begin in time, but no earlier than after a minimal slice."""
    if not others:
        return float("inf")
    latest_s = min([one.due_s - place * slice_s for place, one in enumerate(others)])
    return max(latest_s - near_s - others[0].missing_s, began_s + slice_s)
