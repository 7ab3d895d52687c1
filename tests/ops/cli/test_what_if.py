"""`tidepool what-if` against an API; a run ends as soon as it is asked for, as if a forecaster had been quick."""

import os
from typing import Any

import pytest

from controlplane.api.admin import what_if
from controlplane.planner.what_if.figures import figures_of
from controlplane.store.session import Database
from controlplane.store.what_if import claim_run, complete_run, fail_run
from ops.simulator.results.compare import compare
from ops.simulator.results.kept import result_of
from tests.ops.cli.running import Run
from tests.ops.simulator.results.test_report import result


@pytest.fixture
def costs(fleet: Run, database: Database, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the coming runs cost, each its own; where none is left, the run fails."""
    coming: list[float] = []

    def simulate(_: str) -> None:
        with database.transaction() as session:
            run = claim_run(session, running_max=1)
            assert run is not None
            if coming:
                document = result().model_dump(mode="json")
                document["totals"]["cost"] = coming.pop(0)
                complete_run(session, run.id, figures_of(document, demand_from_s=0), "ab" * 16)
            else:
                fail_run(session, run.id, "no demand is known")

    monkeypatch.setattr(what_if, "enqueue", simulate)
    return coming


def test_runs_are_made_shown_and_compared(fleet: Run, costs: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert "there is no what-if run yet" in fleet("what-if", "show").err
    costs += [100.0, 80.0]
    made = fleet("what-if", "run", "as it is", "--json")
    assert made.status == 0, made.err
    first = made.json["id"]
    shown = fleet("what-if", "run", "half", "--capacity", "us-east=0.5", "--hours", 6).out
    assert "completed" in shown
    assert "capacity us-east=0.5" in shown
    latest = fleet("what-if", "show", "--json").json
    assert (latest["name"], latest["hours"], latest["result"]["totals"]["cost"]) == ("half", 6, 80.0)
    figures = fleet("what-if", "show", "latest").out
    assert "80.00 $" in figures
    assert "IW-F: TTFT p95" in figures
    both = fleet("what-if", "compare", first, "latest")
    assert "-20.00 $" in both.out
    assert "-20.0%" in both.out
    document = fleet("what-if", "compare", first, "latest", "--json").json
    assert (document["a"], document["b"]) == ("as it is", "half")
    assert {line["name"]: line["difference"] for line in document["figures"]}["cost"] == -20.0
    listed = fleet("what-if", "list", "--state", "completed").out
    assert first in listed
    assert "capacity us-east=0.5" in listed
    page = f"{os.environ['TIDEPOOL_URL']}/ui/#/what-if"
    assert fleet("what-if", "show", "--web").out == f"{page}/{latest['id']}\n"
    assert fleet("what-if", "compare", first, "latest", "--web").out == f"{page}?runs={first},{latest['id']}\n"
    assert fleet("what-if", "delete", first).out == f"what-if run {first} is deleted\n"
    assert "(404)" in fleet("what-if", "show", first).err


def test_every_change_is_sent(fleet: Run, costs: list[float]) -> None:
    costs.append(1.0)
    changes = fleet(
        *("what-if", "run", "all", "--strategy", "lt-u", "--capacity", "*,H800=2", "--capacity", "0.5"),
        *("--price", "H800=1.5", "--demand", "us-east,m=1.5", "--lose-region", "us-east=12+2.5", "--json"),
    ).json["changes"]
    assert changes == {
        "strategy": "lt-u",
        "plan_id": None,
        "capacity": [
            {"region": None, "gpu_type": "H800", "factor": 2.0},
            {"region": None, "gpu_type": None, "factor": 0.5},
        ],
        "prices": [{"gpu_type": "H800", "cost_per_hour": 1.5}],
        "demand": [{"region": "us-east", "model": "m", "factor": 1.5}],
        "lost_regions": [{"region": "us-east", "after_h": 12.0, "down_h": 2.5}],
    }
    words = "strategy lt-u; capacity *,H800=2; capacity *=0.5; price H800=1.5; demand us-east,m=1.5"
    assert f"{words}; lose-region us-east=12+2.5" in fleet("what-if", "list").out


def test_a_run_that_fails_says_why(fleet: Run, costs: list[float]) -> None:
    assert costs == []
    failed = fleet("what-if", "run", "x")
    assert failed.status == 1
    assert "is failed: no demand is known" in failed.err
    assert fleet("what-if", "show").status == 0
    refused = fleet("what-if", "compare", "latest", "latest")
    assert refused.status == 1
    assert "only completed runs have figures" in refused.err


def test_a_run_is_cancelled_before_it_is_deleted(fleet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "enqueue", lambda _: None)
    made = fleet("what-if", "run", "x", "--no-wait", "--json").json
    assert made["state"] == "queued"
    assert "(409)" in fleet("what-if", "delete", "latest").err
    assert "cancelled" in fleet("what-if", "cancel", made["id"][:-1]).out
    assert fleet("what-if", "delete", "latest").status == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hours", 169), ("hours", "168")),
        (("--strategy", "hope"), ("changes.strategy", "lt-ua")),
        (("--capacity", "us-east=101"), ("changes.capacity.0.factor", "100")),
        (("--capacity", "mars=1"), ("changes.capacity.0.region", "mars")),
        (("--capacity", "us-east=half"), ("--capacity", "'half' is no number")),
        (("--demand", "nan"), ("--demand", "finite")),
        (("--price", "2.5"), ("--price", "H100=2.5")),
        (("--lose-region", "us-east=24+1"), ("changes.lost_regions.0.after_h", "24")),
        (("--lose-region", "us-east=3"), ("--lose-region", "us-east=12+2")),
        (("--plan", "plan_0"), ("plan_0", "404")),
    ],
)
def test_what_is_wrong_is_named(fleet: Run, options: tuple[Any, ...], said: tuple[str, ...]) -> None:
    refused = fleet("what-if", "run", "x", *options)
    assert refused.status != 0
    for word in said:
        assert word in refused.err, refused.err
    assert fleet("what-if", "list", "--json").json["data"] == []


def test_kept_figures_compare_as_the_whole_ones() -> None:
    whole = result()
    run = {
        "id": "whatif_1",
        "name": "x",
        "state": "completed",
        "event_log_hash": "ab",
        "result": figures_of(whole.model_dump(mode="json"), demand_from_s=0),
    }
    kept = {(line.part, line.name): line.a for line in compare(result_of(run), result_of(run))}
    known = {(line.part, line.name): line.a for line in compare(whole, whole)}
    lost = {("all", name) for name in ("endpoint hours in pools", "slots busy")}
    assert {key: value for key, value in known.items() if key not in lost} == kept
