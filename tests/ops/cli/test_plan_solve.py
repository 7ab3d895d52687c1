"""`tidepool plan solve` and `plan schema`: files in, answers out, no server anywhere."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.cli.main import main
from ops.cli.plan_solve import EXAMPLE


def solve(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = 0
    try:
        main(["plan", *arguments])
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0
    said = capsys.readouterr()
    return status, said.out, said.err


def problem(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(json.loads(EXAMPLE.read_text()) | changes))
    return str(path)


def test_the_example_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = solve(capsys, "solve", str(EXAMPLE), "--json", "--gap", "0")
    answer = json.loads(out)
    assert (status, answer["status"], answer["solver"]) == (0, "optimal", "highs"), err
    assert answer["objective"] == pytest.approx(answer["bound"])
    assert answer["gap"] == pytest.approx(0, abs=1e-6)
    assert answer["seconds"] > 0
    assert answer["unserved"] == answer["below_minimum"] == []
    changes = {(each["model"], each["region"], each["gpu"]): each for each in answer["changes"]}
    assert {name: sorted(answer[name][0]) for name in ("changes", "pools", "pooled")} == {
        "changes": ["after", "before", "change", "constraint", "cost_if_not", "gpu", "model", "reason", "region"],
        "pools": ["after", "before", "gpu", "region"],
        "pooled": ["before", "cost_if_not", "gpu", "model", "occupancy", "reason", "region"],
    }
    grown = changes["chat-70b", "us-east", "H100"]
    assert (grown["before"], grown["after"], grown["constraint"]) == (2, 3, "home")
    assert grown["cost_if_not"] > 0
    assert "peak 19,000 tokens/s x 0.8 at home needs 3" in grown["reason"]
    assert changes["legal-7b", "us-east", "L40S"]["reason"] == "pooled on L40S"
    assert {(each["model"], each["region"]) for each in answer["pooled"]} >= {("legal-7b", "us-east")}
    assert {"region": "us-east", "gpu": "L40S", "before": 0, "after": 1} in answer["pools"]
    assert {"model": "code-7b", "region": "us-west", "gpu": "L40S", "count": 2} in answer["placement"], "the pin"


def test_the_answer_is_the_next_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the placement as its present, the same problem asks for no change."""
    off = problem(tmp_path, pool=None, spot=[])
    first = json.loads(solve(capsys, "solve", off, "--json")[1])
    again = problem(tmp_path, pool=None, spot=[], present=first["placement"])
    assert json.loads(solve(capsys, "solve", again, "--json")[1])["changes"] == []


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = solve(capsys, "solve", str(EXAMPLE))
    assert status == 0
    for words in ("optimal", "objective per hour", "bound", "gap", "seconds", "Changes", "Pool GPUs", "Pooled", "home"):
        assert words in out
    assert "Not served: none" in out


def test_what_cannot_be_served_is_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = json.loads(EXAMPLE.read_text())["gpus"]
    few = [gpu | {"gpus_per_region": {"us-east": 3, "us-west": 3}} for gpu in gpus]
    status, out, _ = solve(capsys, "solve", problem(tmp_path, gpus=few), "--json")
    answer = json.loads(out)
    assert (status, answer["status"]) == (0, "optimal")
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
def test_refused_input_names_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    status, out, err = solve(capsys, "solve", problem(tmp_path, **changes), "--json")
    assert (status, out) == (1, "")
    assert message in err


def test_settings_on_the_command_line_are_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("--gap", "1"), ("--time-limit", "0")):
        status, _, err = solve(capsys, "solve", str(EXAMPLE), *arguments)
        assert status == 1
        assert arguments[0].strip("-").split("-")[0] in err
    assert solve(capsys, "solve", "no-such-file.json")[0] == 1


def test_standard_input_and_an_lp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lp = tmp_path / "placement.lp"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(EXAMPLE.read_bytes())))
    status, out, _ = solve(capsys, "solve", "-", "--json", "--lp", str(lp))
    assert (status, json.loads(out)["status"]) == (0, "optimal")
    assert lp.read_text().lower().count("minimize") == 1


def test_schema_and_example(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(solve(capsys, "schema")[1])
    assert set(schema["$defs"]["Problem"]["properties"]) >= {"regions", "gpus", "models", "instance", "pool", "epsilon"}
    assert json.loads(solve(capsys, "schema", "--example")[1]) == json.loads(EXAMPLE.read_text())
