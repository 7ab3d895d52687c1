"""The benchmark of batches beside interactive requests: its load is as published, and its figures what they say."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from ops.bench.queue.beside_interactive import measure, slowed
from ops.bench.queue.beside_interactive_load import (
    ARMS,
    LINE_TOKENS_MAX,
    Arm,
    Load,
    Round,
    interactive,
    is_burst,
    line_tokens,
    rows,
    unprotected,
)
from ops.bench.queue.beside_interactive_simulated import simulated

LOAD = Load(phase_s=90.0, cycles=2, lines=1000, speed=0.25)


def test_bursts_follow_idle_phases() -> None:
    arrivals = interactive(LOAD)
    assert len(arrivals) == 2 * (90 + 1350)
    assert sum(is_burst(each, LOAD) for each in arrivals) == 2 * 1350
    phases = [is_burst(each, LOAD) for each in arrivals]
    assert [phase for phase, after in pairwise([*phases, None]) if phase != after] == [False, True, False, True]
    assert [arrivals[0].at_s, arrivals[90].at_s] == [0.0, 360.0], "four times as slow"
    assert len({each.number for each in arrivals}) == len(arrivals)


def test_lines_are_as_long_as_published() -> None:
    lengths = line_tokens(5000, seed=1)
    assert fmean(lengths) == pytest.approx(500, rel=0.1)
    assert max(lengths) == LINE_TOKENS_MAX
    assert line_tokens(5000, seed=1) == lengths != line_tokens(5000, seed=2)


def test_unprotected_lines_come_as_long_as_the_run_lasts() -> None:
    sent = unprotected(LOAD, 1, 7)
    assert (len(sent), sent[0].at_s, sent[4].at_s) == (1440, 0.0, 4.0)
    assert sent[-1].at_s == pytest.approx(LOAD.seconds / LOAD.speed, rel=0.01)
    assert [each.tokens for each in sent] == line_tokens(1440, 1)
    assert len(unprotected(replace(LOAD, lines=7), 1, 7)) == 21, "no more than there are"


def test_both_columns() -> None:
    def one(arm: Arm, number: int, p95_s: float, done: float | None = None, took_s: float | None = None) -> Round:
        return Round(
            arm=arm,
            number=number,
            requests=10,
            unanswered=0,
            burst_p50_s=0.01,
            burst_p95_s=p95_s,
            idle_p95_s=0.01,
            done=done,
            took_s=took_s,
        )

    rounds = [
        *(one("alone", number, p95_s) for number, p95_s in enumerate((0.1, 0.2, 0.4))),
        *(one("gated", number, p95_s, 0.9, 60.0 * number) for number, p95_s in enumerate((0.11, 0.2, 0.8))),
    ]
    alone, unsent, flow, gated = rows(rounds)
    assert (alone.theirs_p95_s, alone.ours_p95_s, alone.ours_moves, alone.ours_done) == (0.071, 0.2, 1.0, None)
    assert unsent.ours_p95_s is None
    assert (flow.arm, flow.theirs_p95_s, flow.ours_p95_s) == ("flow control", 3.698, None)
    assert (gated.ours_p95_s, gated.ours_moves) == (0.2, pytest.approx(1.1))
    assert (gated.ours_done, gated.ours_took_min) == (0.9, 1.0)
    assert gated.ours_beside == pytest.approx(1.1), "over all bursts, where single times are not known"
    late = replace(rounds[0], bursts=((10.0, 0.1), (20.0, 0.1), (30.0, 0.1)))
    beside = replace(rounds[3], took_s=25.0, bursts=((10.0, 0.1), (20.0, 0.3), (30.0, 0.9)))
    assert rows([late, beside])[-1].ours_beside == pytest.approx(3.0), "what came later did not run beside lines"
    unfinished = rows([*rounds, one("gated", 3, 0.2, 0.5)])[-1]
    assert (unfinished.ours_done, unfinished.ours_took_min) == (0.5, None)


def test_the_control_plane_is_slowed_down_with_the_replicas() -> None:
    found = slowed(0.25)
    assert found["TIDEPOOL_HEARTBEAT_STALE_S"] == "20"
    assert found["TIDEPOOL_VIEW_REFRESH_S"] == "1"
    assert slowed(0.1)["TIDEPOOL_VIEW_REFRESH_S"] == "1", "as slow as it may be"


def test_the_simulator_runs_the_same_load_to_its_end() -> None:
    load = Load(phase_s=20.0, cycles=1, lines=5, speed=0.25)
    alone, gated = simulated(load, 0)
    assert (alone.arm, alone.requests, alone.unanswered, alone.took_s, alone.done) == ("alone", 320, 0, None, None)
    assert 0.03 < alone.burst_p95_s < 0.1, "a prefill of 30 ms, and at most a few before it"
    assert (gated.requests, gated.unanswered, gated.failed) == (320, 0, 0)
    assert gated.took_s is not None
    assert gated.done is not None
    assert 0 < gated.done <= 1
    assert gated.took_s > 2.0, "the longest of fifteen lines"


@pytest.mark.slow
def test_a_small_run_answers_every_request_and_ends_every_line(tmp_path: Path) -> None:
    load = Load(phase_s=2.0, cycles=1, lines=3, speed=1.0)
    found = {each.arm: each for each in asyncio.run(measure(tmp_path, load, ARMS, 1))}
    assert found.keys() == set(ARMS)
    for each in found.values():
        assert (each.requests, each.unanswered, each.failed) == (32, 0, 0)
        assert 0 < each.burst_p50_s <= each.burst_p95_s
    assert found["gated"].took_s is not None
    assert found["alone"].done is None
