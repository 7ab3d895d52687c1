"""The tables of remapping by load: how runs are compared, and that the page shows the kept ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from ops.bench.papers import remapping_loads
from ops.bench.papers.remapping_load import Recordings
from ops.bench.papers.remapping_loads import (
    COSTS,
    FIGURES,
    GAPS,
    KEPT,
    MEANS,
    PAGE,
    STEPS,
    Steps,
    change,
    compared,
    costs_of,
    gaps_of,
    means_of,
    runs,
)
from ops.bench.papers.remapping_sim import ARRIVALS, ONEIROS, TIDEPOOL, VLLM, VLLM_BY_STEP, WORKLOADS


def run(rival: str, seed: int, value: float, **other: Any) -> dict[str, Any]:
    named = {"group": "spatial", "load": "C1 2/s", "wire": "Grace Hopper", "rival": rival, "seed": seed}
    return named | {"steps": "mixed, 512"} | dict.fromkeys(FIGURES, value) | other


def test_a_change_is_the_mean_over_seeds_of_each_seeds_own() -> None:
    found = [run(VLLM, 0, 1.0), run(VLLM, 1, 2.0), run(ONEIROS, 0, 1.0), run(ONEIROS, 1, 1.0)]
    found += [run(TIDEPOOL, 0, 1.1), run(TIDEPOOL, 1, 2.6), run(VLLM_BY_STEP, 0, 1.0), run(VLLM_BY_STEP, 1, 1.3)]
    rows = compared([each | {"steps": steps.name} for steps in STEPS for each in found])
    row = next(iter(rows))
    assert row[TIDEPOOL]["change"]["tbt_p99_s"] == pytest.approx((20, 10, 30))
    assert change(row, TIDEPOOL, "tbt_p99_s") == "+20 % (+10 to +30)"
    assert change(row, ONEIROS, "tokens_per_s") == "-25 % (-50 to +0)"
    assert "| **+20 % (+10 to +30)** | -25 % (-50 to +0) |" in gaps_of([row]), "later tokens are worse"
    assert row[VLLM]["tokens_per_s"] == 1.5
    mixed = next(row for row in rows if row["steps"] == "mixed, 512")
    assert change(mixed, TIDEPOOL, "tbt_p99_by_step") == "+55 % (+10 to +100)"
    assert change(mixed, VLLM_BY_STEP, "tbt_p99_s") == "-18 % (-35 to +0)"
    assert "| **+55 % (+10 to +100)** |" in costs_of(rows)


def test_a_change_that_rounds_to_none_is_not_bold_and_a_range_of_one_is_not_told() -> None:
    found = [run(VLLM, 0, 1.0), run(VLLM_BY_STEP, 0, 1.0), run(ONEIROS, 0, 1.0), run(TIDEPOOL, 0, 1.004)]
    row = compared([each | {"steps": steps.name} for steps in STEPS for each in found])[0]
    assert "| +0 % | +0 % |" in gaps_of([row])


def test_the_page_shows_the_kept_runs() -> None:
    rows = compared(json.loads(KEPT.read_text(encoding="utf-8")))
    assert GAPS.split(PAGE)[1] == gaps_of(rows)
    assert MEANS.split(PAGE)[1] == means_of(rows)
    assert COSTS.split(PAGE)[1] == costs_of(rows)
    assert len(rows) == 12 * len(STEPS)


@pytest.mark.parametrize("option", ["--seeds", "--requests"])
def test_kept_runs_take_no_other_seeds_or_requests(option: str) -> None:
    commands = Typer()
    commands.command()(remapping_loads.main)
    refused = CliRunner().invoke(commands, [option, "10"])
    assert refused.exit_code == 2
    assert "need --data" in refused.stderr


def test_means_of_requests_are_told_for_each_kind_of_step() -> None:
    rivals = {VLLM: 1.0, VLLM_BY_STEP: 1.0, ONEIROS: 1.0}
    found = [
        run(rival, 0, 1.0, steps=steps.name, tpot_p99_s=value, normalized_p99_s=value)
        for number, steps in enumerate(STEPS, start=1)
        for rival, value in (rivals | {TIDEPOOL: 1 + number / 10}).items()
    ]
    better = [each | {"normalized_p99_s": 0.5} if each["rival"] == TIDEPOOL else each for each in found]
    text = means_of(compared(better))
    assert "| **+10 %** | **+20 %** | **+30 %** | -50 % | -50 % | -50 % |" in text


def test_each_load_runs_with_each_rival_and_seed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remapping_loads, "STEPS", (Steps(name="mixed, 512", chunk_tokens=512, mixed=True),))
    monkeypatch.setattr(remapping_loads, "OF_TABLE", ("uneven",))
    found = runs(Recordings(azure=data / ARRIVALS, aegaeon=data / WORKLOADS), 12, [0, 1])
    assert len(found) == 2 * 4 * 2
    assert {row["rival"] for row in found} == {VLLM, VLLM_BY_STEP, TIDEPOOL, ONEIROS}
    (row, _) = compared(found)
    assert row[VLLM]["tokens_per_s"] > 0
