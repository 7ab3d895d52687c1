"""`tidepool plan solve` and `plan schema`: files in, answers out, no server anywhere."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.cli.plan_solve import EXAMPLE
from tests.ops.cli.running import Run


def problem(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(json.loads(EXAMPLE.read_text()) | changes))
    return str(path)


def test_the_example_for_scripts(run: Run) -> None:
    outcome = run("plan", "solve", EXAMPLE, "--json", "--gap", 0)
    answer = outcome.json
    assert (outcome.status, answer["status"], answer["solver"]) == (0, "optimal", "highs"), outcome.err
    assert answer["objective"] == pytest.approx(answer["bound"])
    assert answer["gap"] == pytest.approx(0, abs=1e-6)
    assert answer["seconds"] > 0
    assert answer["unserved"] == answer["below_minimum"] == []
    changes = {(each["model"], each["region"], each["gpu"]): each for each in answer["changes"]}
    assert {name: sorted(answer[name][0]) for name in ("changes", "pools", "pooled")} == {
        "changes": ["after", "before", "change", "constraint", "cost_if_not", "gpu", "model", "reason", "region"],
        "pools": ["after", "before", "gpu", "region", "worker_gpus"],
        "pooled": ["before", "cost_if_not", "gpu", "model", "occupancy", "reason", "region", "worker_gpus"],
    }
    grown = changes["chat-70b", "us-east", "H100"]
    assert (grown["before"], grown["after"], grown["constraint"]) == (2, 3, "home")
    assert grown["cost_if_not"] > 0
    assert "peak 19,000 tokens/s x 0.8 at home needs 3" in grown["reason"]
    assert changes["legal-7b", "us-east", "L40S"]["reason"] == "pooled on L40S"
    assert {(each["model"], each["region"]) for each in answer["pooled"]} >= {("legal-7b", "us-east")}
    assert {"region": "us-east", "gpu": "L40S", "worker_gpus": 1, "before": 0, "after": 1} in answer["pools"]
    assert {"model": "code-7b", "region": "us-west", "gpu": "L40S", "count": 2} in answer["placement"], "the pin"


def test_the_answer_is_the_next_problem(tmp_path: Path, run: Run) -> None:
    """With the placement as its present, the same problem asks for no change."""
    off = problem(tmp_path, pool=None, spot=[])
    first = run("plan", "solve", off, "--json").json
    again = problem(tmp_path, pool=None, spot=[], present=first["placement"])
    assert run("plan", "solve", again, "--json").json["changes"] == []


def test_for_people(run: Run) -> None:
    outcome = run("plan", "solve", EXAMPLE)
    assert outcome.status == 0
    for words in ("optimal", "objective per hour", "bound", "gap", "seconds", "Changes", "Pool GPUs", "Pooled", "home"):
        assert words in outcome.out
    assert "Not served: none" in outcome.out


def test_what_cannot_be_served_is_an_answer(tmp_path: Path, run: Run) -> None:
    gpus = json.loads(EXAMPLE.read_text())["gpus"]
    few = [gpu | {"gpus_per_region": {"us-east": 3, "us-west": 3}} for gpu in gpus]
    outcome = run("plan", "solve", problem(tmp_path, gpus=few), "--json")
    answer = outcome.json
    assert (outcome.status, answer["status"]) == (0, "optimal")
    assert {each["model"] for each in answer["unserved"]} >= {"chat-70b"}
    assert sorted(answer["unserved"][0]) == ["model", "reason", "region", "tokens_per_s"]
    assert sorted(answer["below_minimum"][0]) == ["minimum", "model", "placed", "reason", "region"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 2}, "$.epsilon"),
        ({"colour": "red"}, "unknown field `colour`"),
        ({"pins": [{"model": "x", "region": "us-east", "count": 1}]}, "$.pins[0].model: 'x' is unknown"),
    ],
)
def test_refused_input_names_the_field(tmp_path: Path, run: Run, changes: dict[str, Any], message: str) -> None:
    outcome = run("plan", "solve", problem(tmp_path, **changes), "--json")
    assert (outcome.status, outcome.out) == (1, "")
    assert message in outcome.err


def test_settings_on_the_command_line_are_checked_too(run: Run) -> None:
    for arguments in (("--gap", "1"), ("--time-limit", "0")):
        outcome = run("plan", "solve", EXAMPLE, *arguments)
        assert outcome.status == 1
        assert arguments[0].strip("-").split("-")[0] in outcome.err
    assert run("plan", "solve", "no-such-file.json").status == 1


def test_standard_input_and_an_lp(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lp = tmp_path / "placement.lp"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(EXAMPLE.read_bytes())))
    assert run("plan", "solve", "-", "--json", "--lp", lp).json["status"] == "optimal"
    assert lp.read_text().lower().count("minimize") == 1


def test_schema_and_example(run: Run) -> None:
    schema = json.loads(run("plan", "schema").out)
    assert set(schema["$defs"]["Problem"]["properties"]) >= {"regions", "gpus", "models", "instance", "pool", "epsilon"}
    assert json.loads(run("plan", "schema", "--example").out) == json.loads(EXAMPLE.read_text())
