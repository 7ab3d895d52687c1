"""What a heartbeat says of time slices on shared workers."""

from dataplane.agent.pool_reports import RUNS_MAX, RUNS_S, runs_of
from dataplane.engines.interface import TimeSlice
from dataplane.protocol.messages import RunReport


def a_slice(model: str, started_s: float, ended_s: float, *, switched: bool = False) -> TimeSlice:
    return TimeSlice(
        kind="decode",
        model=model,
        started_s=started_s,
        ended_s=ended_s,
        tokens=1,
        prompt_tokens=0,
        switched=switched,
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
