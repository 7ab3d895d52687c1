"""What a heartbeat says of time slices on shared workers."""

from dataplane.agent.pool_reports import RUNS_MAX, RUNS_S, SWITCHES_S, runs_of, switches_of
from dataplane.engines.interface import TimeSlice
from dataplane.protocol.pool_reports import RunReport, SwitchReport


def a_slice(
    model: str, started_s: float, ended_s: float, *, switched: bool = False, switch_s: float = 0.0
) -> TimeSlice:
    return TimeSlice(
        kind="decode",
        model=model,
        started_s=started_s,
        ended_s=ended_s,
        tokens=1,
        prompt_tokens=0,
        switched=switched,
        switch_s=switch_s,
    )


def test_slices_of_a_model_that_follow_each_other_are_one_run() -> None:
    slices = [
        a_slice("a", 0.0, 100.0, switched=True),
        a_slice("a", 100.0, 101.0),
        a_slice("a", 101.0, 101.5),
        a_slice("b", 101.5, 103.0, switched=True),
        a_slice("a", 103.0, 104.0, switched=True),
    ]
    assert runs_of(slices, now_s=104.0) == (
        RunReport("a", 104.0, 101.5, True),
        RunReport("b", 2.5, 1.5, True),
        RunReport("a", 1.0, 1.0, True),
    )


def test_old_runs_are_left_out_and_only_the_last_ones_are_said() -> None:
    assert runs_of([a_slice("a", 0.0, 1.0)], now_s=1.5 + RUNS_S) == ()
    many = [a_slice("ab"[n % 2], n / 100, (n + 1) / 100, switched=True) for n in range(50)]
    runs = runs_of(many, now_s=0.5)
    assert len(runs) == RUNS_MAX
    assert runs[-1] == RunReport("b", 0.01, 0.01, True)


def test_switches_of_the_last_minute_are_counted_with_their_cost() -> None:
    assert switches_of([], now_s=5.0) is None
    slices = [
        a_slice("a", 0.0, 30.0, switched=True, switch_s=9.0),
        a_slice("b", 30.0, 40.0, switched=True, switch_s=0.5),
        a_slice("b", 40.0, 41.0),
        a_slice("a", 41.0, 42.0, switched=True),
        a_slice("b", 42.0, 43.0, switched=True, switch_s=1.5),
    ]
    assert switches_of(slices, now_s=50.0) == SwitchReport(window_s=50.0, switches=4, median_s=1.0, total_s=11.0)
    assert switches_of(slices, now_s=80.0) == SwitchReport(window_s=SWITCHES_S, switches=3, median_s=0.5, total_s=2.0)
    assert switches_of(slices, now_s=500.0) == SwitchReport(window_s=SWITCHES_S, switches=0, median_s=0.0, total_s=0.0)
