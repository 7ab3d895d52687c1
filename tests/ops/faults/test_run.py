"""`tidepool faults run`, small: a minute of all kinds of faults breaks no promise and leaves nothing behind."""

import json
import os
import subprocess
import sys

import pytest

TIDEPOOL = (sys.executable, "-m", "ops.cli.main")
KINDS = {"kill", "kill_worker", "terminate", "pause", "latency", "reset", "black_hole", "restart"}


def run_cli(*options: str) -> subprocess.CompletedProcess[str]:
    """`tidepool faults run` with these options."""
    return subprocess.run(
        [*TIDEPOOL, "faults", "run", *options],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={**os.environ},
    )


@pytest.mark.slow
def test_a_minute_of_faults_breaks_no_promise() -> None:
    small = ("--regions", "2", "--nodes", "3", "--models", "4", "--streams", "4")
    ended = run_cli("--minutes", "1", "--every-s", "4", *small, "--json")
    assert ended.stdout, ended.stderr
    report = json.loads(ended.stdout)
    assert report["broken"] == [], ended.stderr
    assert ended.returncode == 0
    assert sum(report["faults"].values()) >= 10
    assert set(report["faults"]) <= KINDS
    assert report["interactive"]["outcomes"]["whole"] > 10
    assert report["interactive_after"]["outcomes"]["whole"] > 10
    assert report["batches"]["accepted"] >= 2
    assert report["batches"]["lines_by_code"]["200"] == report["batches"]["lines"]


def test_an_unknown_kind_is_refused_by_name() -> None:
    ended = run_cli("--only", "kill,flood")
    assert ended.returncode == 1
    assert "'flood'" in ended.stderr
    assert "black_hole" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["region", "partition", "primary"])
def test_a_lost_region_breaks_no_promise(loss: str) -> None:
    small = ("--regions", "3", "--nodes", "3", "--models", "2", "--streams", "2")
    ended = run_cli("--region-loss", loss, "--minutes", "0.75", *small, "--json")
    assert ended.stdout, ended.stderr
    report = json.loads(ended.stdout)
    assert report["broken"] == [], ended.stderr
    assert ended.returncode == 0
    assert report["writes_back_after_s"] is not None
    assert report["batches"]["lines_by_code"] == {"200": report["batches"]["lines"]}
    assert report["batches"]["lines"] > 0
    assert all(changes["acknowledged"] > 10 for changes in report["changes"].values())
    assert sum(plans["applied"] for plans in report["plans"].values()) > 0, report["plans"]


@pytest.mark.slow
def test_regions_out_of_step_break_no_promise() -> None:
    """Clocks are wrong by up to 5 s, one copy of the database lags by 10 s, and another hangs."""
    small = ("--regions", "3", "--nodes", "3", "--models", "2", "--streams", "2")
    ended = run_cli("--out-of-step", "--minutes", "0.75", *small, "--json")
    assert ended.stdout, ended.stderr
    report = json.loads(ended.stdout)
    assert report["broken"] == [], ended.stderr
    assert ended.returncode == 0
    assert report["batches"]["lines_by_code"] == {"200": report["batches"]["lines"]}
    assert report["limits"]["limited"]["refused"]["429"] > 0
    assert report["limits"]["budgeted"]["refused"]["429"] > 0
    assert all(found["keys"] > 0 for found in report["revoked_keys_worked_for_s"].values())
    assert sum(plans["applied"] for plans in report["plans"].values()) > 0, report["plans"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--out-of-step", "--region-loss", "region"), "--out-of-step: it is a drill of its own"),
        (("--out-of-step", "--regions", "2"), "--out-of-step: needs --regions 3"),
        (("--skew-s", "5"), "--skew-s and --patroni: need --region-loss"),
        (("--region-loss", "partition", "--patroni", sys.executable), "--patroni: needs --region-loss region"),
        (("--region-loss", "region", "--skew-s", "5", "--patroni", sys.executable), "--patroni: leave --skew-s out"),
    ],
)
def test_drills_that_do_not_go_together_are_refused(options: tuple[str, ...], why: str) -> None:
    ended = run_cli(*options)
    assert ended.returncode == 1
    assert why in ended.stderr


def test_an_unknown_loss_is_refused_by_name() -> None:
    ended = run_cli("--region-loss", "planet")
    assert ended.returncode == 1
    assert "'planet' is none of region, partition, primary" in ended.stderr
