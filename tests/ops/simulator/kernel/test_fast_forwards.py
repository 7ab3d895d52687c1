"""Closed forms against one step at a time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.protocol.tiers import Objective
from ops.simulator.kernel.fast_forwards import FastForward
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.kernel.timeline import Timeline
from tests.ops.simulator.replayed import LATENCY

Pace = tuple[float, float]
"""The time of the first step, and by how much each later one is longer."""

paces = st.tuples(st.floats(1e-3, 0.1), st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)))
steps = st.integers(1, 300)


def ends_s(fast_forward: FastForward) -> list[float]:
    took_s = (fast_forward.first_s + k * fast_forward.growth_s for k in range(fast_forward.steps))
    return [fast_forward.started_s + s for s in itertools.accumulate(took_s)]


def test_steps_take_what_the_latency_model_says() -> None:
    one_by_one_s = sum(LATENCY.decode_s(5000 + 7 * k, 7) for k in range(100))
    fast_forward = FastForward(0.0, *LATENCY.decode_pace_s(5000, 7), 100)
    assert fast_forward.seconds(100) == pytest.approx(one_by_one_s, rel=1e-12)


@given(paces, st.integers(0, 300), st.floats(0.0, 1.0))
def test_the_fewest_steps_that_reach_a_time(pace: Pace, count: int, share: float) -> None:
    whole = FastForward(2.0, *pace, 1000)
    seconds = whole.seconds(count) + share * (whole.seconds(count + 1) - whole.seconds(count))
    fewest = whole.steps_to(seconds)
    assert whole.seconds(fewest) >= seconds
    assert fewest == 1 or whole.seconds(fewest - 1) < seconds


@given(paces, steps, st.integers(1, 300), st.floats(0.01, 0.99))
def test_a_cut_ends_with_the_step_that_runs(pace: Pace, count: int, step: int, share: float) -> None:
    fast_forward = FastForward(2.0, *pace, count)
    at_s = fast_forward.ended_s(step - 1) + share * (fast_forward.ended_s(step) - fast_forward.ended_s(step - 1))
    assert fast_forward.cut(at_s) == (step < count)
    assert fast_forward.steps == min(step, count)


@given(paces, steps, st.floats(-5.0, 20.0), st.floats(0.001, 0.2))
def test_lateness_of_a_fast_forward(pace: Pace, count: int, due_s: float, tbt_s: float) -> None:
    fast_forward = FastForward(2.0, *pace, count)
    lates_s = [out_s - due_s - k * tbt_s for k, out_s in enumerate(ends_s(fast_forward))]
    assert fast_forward.late_s(due_s, tbt_s) == pytest.approx(max(lates_s), abs=1e-6)
    sure = sum(late_s <= -1e-9 for late_s in lates_s), sum(late_s <= 1e-9 for late_s in lates_s)
    assert sure[0] <= fast_forward.in_time(due_s, tbt_s) <= sure[1]


@given(st.lists(st.tuples(paces, st.integers(1, 20), st.floats(0.0, 0.5)), min_size=1, max_size=12), st.data())
def test_a_timeline_answers_as_its_steps_would(parts: list[tuple[Pace, int, float]], data: st.DataObject) -> None:
    tbt_s, timeline, now_s = 0.05, Timeline(), 0.0
    timeline.expect(tbt_s)
    outs_s: list[float] = []
    begins = []
    for pace, count, pause_s in parts:
        fast_forward = FastForward(now_s + pause_s, *pace, count)
        begins.append(timeline.step + 1)
        now_s = fast_forward.ended_s(count)
        timeline.add(fast_forward, now_s)
        outs_s += ends_s(fast_forward)
    first = data.draw(st.sampled_from(begins))
    timeline.forget(data.draw(st.sampled_from([b for b in begins if b <= first])))
    due_s = data.draw(st.floats(0.0, now_s))
    lates_s = [out_s - due_s - k * tbt_s for k, out_s in enumerate(outs_s[first - 1 :])]
    assert timeline.late_s(first, due_s, tbt_s) == pytest.approx(max(lates_s), abs=1e-6)
    sure = sum(late_s <= -1e-9 for late_s in lates_s), sum(late_s <= 1e-9 for late_s in lates_s)
    assert sure[0] <= timeline.in_time(first, due_s, tbt_s) <= sure[1]


def test_served_tokens_travel_back() -> None:
    request = Request(number=0, arrived_s=10.0, model="m", origin="r", tier="IW-F", prompt_tokens=5, output_tokens=4)
    served = Served(request=request, target=Objective(ttft_s=1.0, tbt_s=0.1), back_s=0.25)
    served.token(10.8)  # there at 11.05, 0.05 late
    served.fast_forward(FastForward(10.8, 0.04, 0.0, 3))
    assert served.ttft_s == pytest.approx(1.05)
    assert served.in_time == 3
    assert served.late_s == pytest.approx(0.05)
    assert served.share == pytest.approx(1 - 0.05 / 1.17)
    assert served.left == 0
