"""The comparison's command: its loads, its tables and its JSON."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ops.bench.papers.remapping_sim import (
    GROUPS,
    ONEIROS,
    PUBLISHED,
    VLLM,
    Asked,
    against_published,
    by_load,
    main,
)


def invoke(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout


def test_the_runs_and_the_papers_figures_beside_ours(data: Path) -> None:
    code, out = invoke("--data", str(data), "--group", "uneven", "--group", "caps", "--requests", "12", "--json")
    assert code == 0
    answer = json.loads(out)
    assert {row["group"] for row in answer["runs"]} == {"uneven", "caps"}
    assert all(row["tokens_per_s"] > 0 for row in answer["runs"])
    assert {row["rival"] for row in answer["runs"]} >= {VLLM, ONEIROS, "capped", "not capped"}
    first = answer["published"][0]
    assert (first["figure"], first["percent"]) == ("tokens_per_s", 86.7)
    assert first["least"] <= first["ours_percent"] <= first["most"]
    assert {row["group"] for row in answer["published"]} <= {"uneven", "caps"}


@pytest.mark.parametrize("mixed", [False, True])
def test_every_load_has_its_own_comparison_with_vllm(data: Path, *, mixed: bool) -> None:
    options = ("--data", str(data), "--group", "uneven", "--requests", "12", "--chunk-tokens", "256")
    code, out = invoke(*options, "--json", *["--mixed"] * mixed)
    assert code == 0
    answer = json.loads(out)
    assert [(row["load"], row["rival"]) for row in answer["by_load"]] == [
        (load, rival)
        for load in ("C2 sharegpt 0.5+1.5/s", "C2 sharegpt 1.5+0.5/s")
        for rival in ("Oneiros", "Tidepool")
    ]
    row = answer["by_load"][0]
    vllm, own = (next(run for run in answer["runs"] if run["rival"] == rival) for rival in (VLLM, ONEIROS))
    assert row["tbt_p99_s"] == pytest.approx(100 * (own["tbt_p99_s"] / vllm["tbt_p99_s"] - 1))
    assert row["ttft_p99_s"] == [vllm["ttft_p99_s"], own["ttft_p99_s"]]
    assert own["normalized_p99_s"] >= own["normalized_p50_s"] > 0


def test_loads_of_different_wires_are_compared_with_their_own_vllm() -> None:
    figures = dict.fromkeys(("tokens_per_s", "tpot_p99_s", "normalized_p99_s", "ttft_p99_s", "batch_mean"), 1.0)
    rows = [
        {"group": "wires", "load": "x", "wire": wire, "rival": rival, "tbt_p99_s": tbt_s, **figures}
        for wire, rival, tbt_s in (
            ("fast", VLLM, 1.0),
            ("fast", ONEIROS, 2.0),
            ("slow", VLLM, 4.0),
            ("slow", ONEIROS, 2.0),
        )
    ]
    assert [(row["wire"], row["tbt_p99_s"]) for row in by_load(rows)] == [("fast", 100.0), ("slow", -50.0)]


def test_an_unknown_group_is_refused(data: Path) -> None:
    code, _ = invoke("--data", str(data), "--group", "none")
    assert code == 2


def test_every_published_figure_has_its_runs() -> None:
    """Each group's cases name both rivals, for the same loads."""
    for published in PUBLISHED:
        cases = list(GROUPS[published.group](Asked(requests=10)))
        own, other = (
            [case.title for case in cases if case.rival == name] for name in (published.rival, published.than)
        )
        assert own == other != []


def test_a_change_is_the_mean_over_the_loads_that_lacked_memory() -> None:
    rows = [
        {
            "group": "caps",
            "load": load,
            "rival": rival,
            "tpot_p99_s": value,
            "tpot_p50_s": 1.0,
            "counts": {"recomputed": 0, "deepened": int(load != "calm")},
        }
        for load, rival, value in (
            ("x", "capped", 1.0),
            ("x", "not capped", 2.0),
            ("y", "capped", 3.0),
            ("y", "not capped", 4.0),
            ("calm", "capped", 1.0),
            ("calm", "not capped", 1.0),
        )
    ]
    found = against_published("caps", rows)
    assert [round(row["ours_percent"], 1) for row in found] == [-37.5, 0.0]
    assert (found[0]["least"], found[0]["most"]) == (-50.0, -25.0)
