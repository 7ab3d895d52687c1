"""Time slices by deadlines: which model of a slot runs, and until when. Pure.

Each model has one due time: the latest moment at which it must run again, so that its most urgent next token, of a
waiting prompt or of its batch, is made in time. A slice serves a model's prompts and its batch alike, so that neither
costs a switch of its own; the first model to be due has the next one (earliest deadline first).

1. A slice lasts at least as long as the longest load of any model with work, within the limits of a quota. So the next
   model is loaded while it runs, and however late all models are, switches take no more of the time than steps do.
   Where loads are waited for, on a slot with room for one model, and the batches need a share u of its time, a slice
   lasts u / (1 - u) such loads: as long as leaves the batches that share.
2. It then ends if a prompt or a batch request of another model waits. If none does, it goes on for as long as all
   others, each in its turn and with a minimal slice for every one before it, can still begin in time. A batch decodes
   several times faster than its tokens are due: what it makes meanwhile lasts through the slices of others.
3. Models with batch requests alone get a minimal slice where all others can wait that long, or once they have waited
   for `BATCH_ROUNDS`; else they are last.
4. Prompts of another model that is loaded are prefilled within the slice, as long as that makes no token of it late.
5. No model is due before it waits, nor more than `ROUNDS` after: so models that are late take turns, and none waits
   longer than that and a minimal slice of each other one. A round is a minimal slice of every model with work.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.scheduling.decode import DecodeSettings

TimeSlices = Literal["rounds", "deadlines"]
"""How a slot divides its time among models: in `rounds` of quotas (`decode.py`), or by `deadlines`."""
ROUNDS = 2.0
"""After so many rounds of waiting a model is due, whatever its deadlines are."""
BATCH_ROUNDS = 20.0
"""The same for one with batch requests alone."""


class ModelWork(Struct, frozen=True, kw_only=True):
    """A model with something to run. `due_s`: when its next step must begin, by the clock. `missing_s`: seconds until
    its weights would be loaded, if that began now; `load_s`: how long the whole load takes. `prompts`: whether a prompt
    waits, and `prefill_s` how long the first takes; `background`: whether all of its work is of batch requests.
    """

    model: str
    due_s: float
    missing_s: float = 0.0
    load_s: float = 0.0
    prompts: bool = False
    prefill_s: float = 0.0
    background: bool = False


class SliceState(Struct, frozen=True, kw_only=True):
    """The present slice. `began_s`: when its model was loaded; `ends_s`: when another model runs, infinite if no other
    has work. `stuck`: models that could not run since the last slice that did; all others are tried before them.
    `since_s`: when each other model with requests began to wait for a slice.
    """

    model: str | None = None
    began_s: float = 0.0
    ends_s: float = 0.0
    stuck: frozenset[str] = frozenset()
    since_s: Mapping[str, float] = field(default_factory=dict)

    def cut_short(self, model: str) -> "SliceState":
        """The state after a step of a model that could not run."""
        return replace(self, stuck=self.stuck | {model})


class SliceChoice(Struct, frozen=True, kw_only=True):
    """The model to run and `following`, all others with work in their order. `slice_s`: what each gets at least."""

    model: str
    following: tuple[str, ...]
    slice_s: float


def choose_slice(
    work: Sequence[ModelWork],
    state: SliceState,
    now_s: float,
    *,
    near_s: float,
    settings: DecodeSettings,
    exposed_share: float = 0.0,
    held: Collection[str] = (),
) -> tuple[SliceChoice, SliceState]:
    """The model to run now. Called before every step.

    Args:
        work: that of different models, at least one.
        state: as it was returned for the step before.
        near_s: how much earlier than at the latest moment a model is to begin.
        settings: limits of a slice.
        exposed_share: of the slot's time, what the steps of all batches need to make their tokens in time, where loads
            are waited for; 0 where they are hidden.
        held: models with requests, perhaps none that can run now. Their waits go on.
    """
    assert work
    slice_s = least_s(max([one.load_s for one in work]), exposed_share, settings)
    models = {*held, *[one.model for one in work]}
    since_s = {model: state.since_s.get(model, now_s) for model in models if model != state.model}
    work = _by_due(work, since_s, now_s, slice_s, near_s)
    stuck, began_s = state.stuck, state.began_s
    if all(one.model in stuck for one in work):
        stuck = frozenset()
    present = next((one for one in work if one.model == state.model and one.model not in stuck), None)
    if present is not None and present.missing_s:
        began_s = now_s + present.missing_s
    if present is None or now_s >= _ends_s(present, work, began_s, slice_s, near_s):
        stuck = stuck if state.model in stuck else frozenset()
        present = min(work, key=lambda one: (one.model in stuck, one.due_s == math.inf, one.model == state.model))
        began_s = now_s + present.missing_s
        if state.model in models:
            since_s[state.model] = now_s
    return SliceChoice(
        model=present.model,
        following=tuple([one.model for one in work if one is not present]),
        slice_s=slice_s,
    ), SliceState(
        model=present.model,
        began_s=began_s,
        ends_s=_ends_s(present, work, began_s, slice_s, near_s),
        stuck=stuck,
        since_s=since_s,
    )


def least_s(load_s: float, exposed_share: float, settings: DecodeSettings) -> float:
    """How long each slice is at least (rule 1), if the longest load takes `load_s`."""
    loads = max(1.0, exposed_share / (1 - exposed_share)) if exposed_share < 1 else math.inf
    return min(max(settings.quota_min_s, load_s and loads * load_s), settings.quota_max_s)


def prompts_aside(work: Sequence[ModelWork], present: str, now_s: float) -> str | None:
    """Another model whose prompts are prefilled within the present slice, None if there is none (rule 4)."""
    due_s = next(one.due_s for one in work if one.model == present)
    ready = [one for one in work if one.model != present and one.prompts and not one.background and not one.missing_s]
    first = min(ready, key=lambda one: one.due_s, default=None)
    return first.model if first is not None and due_s >= now_s + first.prefill_s else None


def _by_due(
    work: Sequence[ModelWork], since_s: Mapping[str, float], now_s: float, slice_s: float, near_s: float
) -> list[ModelWork]:
    """The models by due time; those with batch requests alone are due at once, have waited long enough, or come last
    (rules 3 and 5). The present one waits since now.
    """
    round_s = len(work) * slice_s
    waited = [(one, since_s.get(one.model, now_s)) for one in sorted(work, key=attrgetter("due_s"))]
    urgent = [_within(one, each_s, ROUNDS * round_s) for one, each_s in waited if not one.background]
    background = sorted([(each_s, one) for one, each_s in waited if one.background], key=itemgetter(0))
    urgent.sort(key=attrgetter("due_s"))
    if not urgent or not background:
        return urgent or [one for _, one in background]
    missing_s = max([one.missing_s for _, one in background])
    if _latest_s(urgent, slice_s, near_s) >= now_s + missing_s + slice_s:
        return [*[replace(one, due_s=now_s) for _, one in background], *urgent]
    rounds_s = BATCH_ROUNDS * round_s
    late = [replace(one, due_s=each_s + rounds_s) for each_s, one in background if each_s + rounds_s <= now_s]
    last = [replace(one, due_s=math.inf) for _, one in background[len(late) :]]
    return [*sorted([*urgent, *late], key=attrgetter("due_s")), *last]


def _within(one: ModelWork, since_s: float, rounds_s: float) -> ModelWork:
    """The model, due neither before it waits nor so long after (rule 5)."""
    return replace(one, due_s=min(max(one.due_s, since_s), since_s + rounds_s))


def _latest_s(ordered: Sequence[ModelWork], slice_s: float, near_s: float) -> float:
    """Until when all can wait, if each then gets a minimal slice after the other."""
    return min([one.due_s - place * slice_s for place, one in enumerate(ordered)]) - near_s - ordered[0].missing_s


def _ends_s(present: ModelWork, ordered: Sequence[ModelWork], began_s: float, slice_s: float, near_s: float) -> float:
    """When the slice of a model ends, infinite if no other has work (rules 1 to 3)."""
    others = [one for one in ordered if one is not present]
    if not others:
        return math.inf
    least_s = began_s + slice_s
    if present.background or any(one.prompts or one.background for one in others):
        return least_s
    return max(least_s, _latest_s(others, slice_s, near_s))
