"""`tidepool top`: what it shows, and that it says what is away."""

from typing import Any

import pytest
from rich.console import Console

from controlplane.policies.lifecycle import LOST, InstanceState
from ops.cli.top_screen import ROWS_MAX, Snapshot, screen, take_snapshot
from ops.client.api import CommandError

STATUS = {
    "health": {"status": "ok", "missing": [], "away": [], "late": [], "lost": [], "behind": [], "replica_age_s": None},
    "loops": [
        {"loop": "scale", "late": False, "since_success_s": 3.2, "since_failure_s": 900.0, "last_error": "old"},
        {"loop": "plan", "late": True, "since_success_s": 7200.0, "since_failure_s": 60.0, "last_error": "no solver"},
        {"loop": "sweep", "late": True, "since_success_s": None, "since_failure_s": None, "last_error": None},
    ],
    "regions": [{"name": "us-east", "nodes": 3, "nodes_alive": 2, "gpus": 24, "instances": 5, "instances_ready": 4}],
    "batches": {"in_progress": 2},
    "unplaced": [{"model": "ebb", "region": "us-east", "gpu_type": "H800", "count": 2, "reason": "GPUs full"}],
    "requests_waiting": 17,
    "requests_running": 3,
    "plan": {"id": "plan_1", "status": "optimal", "reason": "the hour of 12:00"},
}
LIVE = {
    "view_fresh": True,
    "endpoints": [
        {
            "model": "tide",
            "region": "us-east",
            "instances": {"ready": 2, "loading": 1},
            "utilization": 0.731,
            "remaining_tokens": 12_345,
            "load": 0.4,
        },
        {
            "model": "ebb[bold]",
            "region": "us-east",
            "instances": {},
            "utilization": None,
            "remaining_tokens": None,
            "load": None,
        },
    ],
    "queues": [{"model": "tide", "tokens": 5400.0, "due_s": 4600.0, "at_least": False}],
    "objectives": [{"tier": "IW-F", "answers": 200, "kept": 199, "tokens": 1000, "tokens_in_time": 990}],
}


class FakeApi:
    """Answers by path; an exception is raised."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers

    def probe(self, path: str) -> Any:
        return self.get(path)

    def get(self, path: str) -> Any:
        answer = self._answers[path]
        if isinstance(answer, Exception):
            raise answer
        return answer


def _snapshot(**answers: Any) -> Snapshot:
    whole = {"/readyz": STATUS["health"], "/admin/status": STATUS, "/admin/status/live": LIVE}
    return take_snapshot(FakeApi({**whole, **answers}), "http://here")  # type: ignore[arg-type]


def _shown(snapshot: Snapshot, *, width: int = 140, height: int | None = None) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(screen(snapshot, width=width, height=height))
    return captured.get()


@pytest.mark.parametrize("state", [*(each for each in InstanceState if each != InstanceState.STOPPED), LOST])
def test_instances_of_every_state_are_counted(state: str) -> None:
    [endpoint, _] = LIVE["endpoints"]
    live = {**LIVE, "endpoints": [{**endpoint, "instances": {state: 37}}]}
    assert f"37 {state}" in _shown(Snapshot(at_s=0.0, url="", status=STATUS, live=live, ready=STATUS["health"]))


def test_everything_is_shown() -> None:
    text = _shown(Snapshot(at_s=1000.0, url="http://here", status=STATUS, live=LIVE, ready=STATUS["health"]))
    for words in (
        "2 of 3",
        "4 of 5",
        "73%",
        "12,345",
        "ebb[bold]",
        "not placed: ebb in us-east: 2 on H800: GPUs full",
        "nothing usable",
        "5,400",
        "1 h 00 min",
        "99.5%",
        "99.0%",
        "plan_1 (optimal)",
        "17 requests waiting, 3 running",
    ):
        assert words in text, words
    assert " ok\n" in text
    assert "last success: plan 2 h LATE (no solver); sweep never LATE; scale 3 s\n" in text


def test_what_is_away_is_said_and_the_rest_is_shown() -> None:
    away = CommandError("the database does not answer (503)", status=503)
    snapshot = _snapshot(**{"/readyz": away, "/admin/status": away})
    assert snapshot.status is None
    assert snapshot.away == {"readiness": str(away), "fleet": str(away)}
    text = _shown(snapshot)
    assert "health unknown" in text
    assert "fleet: the database does not answer" in text
    assert "73%" in text
    assert snapshot.as_json()["live"] == LIVE


def test_a_gateway_that_is_away_altogether_is_said() -> None:
    gone = CommandError("http://here cannot be reached")
    text = _shown(_snapshot(**{"/readyz": gone, "/admin/status": gone, "/admin/status/live": gone}))
    assert "endpoints: http://here cannot be reached" in text


def test_a_stale_view_is_said() -> None:
    assert "last copy" in _shown(_snapshot(**{"/admin/status/live": {**LIVE, "view_fresh": False}}))


def test_a_refused_key_is_an_error() -> None:
    with pytest.raises(CommandError, match="key"):
        _snapshot(**{"/admin/status": CommandError("the key is unknown (401)", status=401)})


def test_the_busiest_endpoints_are_shown_and_the_others_counted() -> None:
    endpoint = LIVE["endpoints"][0]  # type: ignore[index]
    many = [{**endpoint, "model": f"m{n:03}", "utilization": n / 100} for n in range(ROWS_MAX + 7)]
    text = _shown(_snapshot(**{"/admin/status/live": {**LIVE, "endpoints": many}}))
    assert "endpoint (7 more)" in text
    assert f"m{ROWS_MAX + 6:03}" in text
    assert "m000" not in text


def test_a_deadline_that_has_passed_is_negative() -> None:
    late = {**LIVE, "queues": [{"model": "tide", "tokens": 70.0, "due_s": 910.0, "at_least": True}]}
    text = _shown(Snapshot(at_s=1000.0, url="u", status=None, live=late, ready=None))
    assert "-1 min 30 s" in text
    assert "70 or more" in text


def _busy_fleet() -> Snapshot:
    regions = [{**STATUS["regions"][0], "name": f"region-{n}"} for n in range(9)]  # type: ignore[index]
    plan = {"id": "plan_0190f3c2a7b57c1e8d2f4b6a8c0e1f23", "status": "optimal", "reason": "the hour of 12:00 " * 9}
    states = {"ready": 12, "loading": 1, "failed": 1}
    endpoint = {"region": "us-east-1", "utilization": 0.731, "remaining_tokens": 12_345_678, "load": 0.4}
    endpoints = [{**endpoint, "model": f"Qwen/Qwen3-Coder-{n:03}B-Instruct", "instances": states} for n in range(40)]
    queues = [{"model": f"Qwen/Qwen3-{n}B", "tokens": 5e9, "due_s": 4600.0 - n, "at_least": True} for n in range(9)]
    live = {**LIVE, "endpoints": endpoints, "queues": queues}
    return _snapshot(**{"/admin/status": {**STATUS, "regions": regions, "plan": plan}, "/admin/status/live": live})


@pytest.mark.parametrize("height", [24, 30, 50])
def test_a_terminal_of_80_columns_shows_every_part(height: int) -> None:
    lines = _shown(_busy_fleet(), width=80, height=height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in ("region", "IW-F", "endpoint (", "Qwen/Qwen3-Coder-000B-Instruct", "12 ready, 1 loading, 1 failed"):
        assert words in text, words
    for words in ("NIW queue", "Qwen/Qwen3-8B", "73%", "5,000,000,000 or more"):
        assert words in text, words
    assert "12,345,678" not in text, "a column less rather than names cut short"
    assert "load" not in text.replace("loading", "")


def test_a_wide_terminal_shows_all_columns() -> None:
    text = _shown(_busy_fleet(), width=120, height=24)
    assert "12,345,678" in text
    assert "0.40" in text


def test_the_head_says_what_the_probe_says() -> None:
    late = {
        "status": "degraded",
        "missing": [],
        "away": ["redis"],
        "late": ["plan", "scale"],
        "lost": ["n1"],
        "behind": [],
        "replica_age_s": None,
    }
    text = _shown(_snapshot(**{"/readyz": late}))
    assert " degraded\naway: redis; late loops: plan, scale; lost nodes: n1\n" in text


def test_the_head_says_how_old_the_regions_copy_is() -> None:
    away = {"status": "degraded", "missing": [], "away": ["postgres"], "late": [], "lost": [], "behind": []}
    text = _shown(_snapshot(**{"/readyz": away | {"replica_age_s": 900.0}}))
    assert " degraded\naway: postgres; the region's copy of the database may be 15 min old\n" in text
