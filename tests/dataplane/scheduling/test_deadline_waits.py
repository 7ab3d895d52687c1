"""No model waits without bound for a slice by deadlines, however late the others are."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.scheduling.deadlines import BATCH_ROUNDS, ROUNDS, ModelWork, SliceState, choose_slice
from dataplane.scheduling.decode import DecodeSettings

LIMITS = DecodeSettings(quota_min_s=0.05, quota_max_s=4.0)


@dataclass(kw_only=True)
class Model:
    """One with work from `from_s` on, without end. It is always so late or so early (`ahead_s`)."""

    name: str
    from_s: float
    ahead_s: float
    load_s: float
    prompts: bool
    background: bool
    waits_since_s: float | None = None
    longest_s: float = 0.0


@dataclass(kw_only=True)
class Slot:
    """A slot that holds one model, and whose steps take `step_s`. A load is done in full before the first step."""

    models: list[Model]
    step_s: float
    now_s: float = 0.0
    loaded: str | None = None
    state: SliceState = field(default_factory=SliceState)

    def step(self) -> None:
        here = [one for one in self.models if one.from_s <= self.now_s]
        if not here:
            self.now_s += self.step_s
            return
        work = [
            ModelWork(
                model=one.name,
                due_s=self.now_s + one.ahead_s,
                missing_s=0.0 if one.name == self.loaded else one.load_s,
                load_s=one.load_s,
                prompts=one.prompts,
                background=one.background,
            )
            for one in here
        ]
        choice, self.state = choose_slice(work, self.state, self.now_s, near_s=0.25, settings=LIMITS)
        for one in here:
            if one.name == choice.model:
                one.waits_since_s = None
                self.now_s += self.step_s + (one.load_s if one.name != self.loaded else 0.0)
        for one in here:
            if one.name != choice.model:
                one.waits_since_s = self.now_s if one.waits_since_s is None else one.waits_since_s
                one.longest_s = max(one.longest_s, self.now_s - one.waits_since_s)
        self.loaded = choice.model


@st.composite
def slots(draw: st.DrawFn) -> Slot:
    models = [
        Model(
            name=name,
            from_s=draw(st.floats(0, 30)),
            ahead_s=draw(st.one_of(st.floats(-1000, 0), st.floats(0, 1000))),
            load_s=draw(st.sampled_from([0.0, 0.1, 0.5, 1.5, 6.0])),
            prompts=draw(st.booleans()),
            background=draw(st.booleans()),
        )
        for name in "abcde"[: draw(st.integers(2, 5))]
    ]
    return Slot(models=models, step_s=draw(st.floats(0.2, 0.6)))


@given(slot=slots())
@settings(max_examples=60, deadline=None)
def test_every_model_has_a_slice_within_so_many_rounds(slot: Slot) -> None:
    """The rounds of its wait, and then a slice, a load and a step of each other model before it."""
    count = len(slot.models)
    most_load_s = max(one.load_s for one in slot.models)
    slice_s = min(max(LIMITS.quota_min_s, most_load_s), LIMITS.quota_max_s)
    each_s = slice_s + most_load_s + 2 * slot.step_s
    rounds = BATCH_ROUNDS if any(one.background for one in slot.models) else 4 * ROUNDS
    while slot.now_s < 30 + 1.5 * rounds * count * each_s:
        slot.step()
    for one in slot.models:
        rounds = BATCH_ROUNDS if one.background else ROUNDS
        assert one.longest_s <= rounds * count * slice_s + count * each_s
