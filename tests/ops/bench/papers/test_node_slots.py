"""The slots of a node alone, split and together: who serves what, and the command."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.bench.papers import node_slots as bench
from ops.bench.papers.node_slots import dealt, drawn_anew, layouts
from ops.bench.papers.workloads import model_name
from ops.simulator.traffic.traces import Recorded


def asked(*models: int) -> list[Recorded]:
    return [Recorded(float(n), model_name(model), prompt_tokens=10, output_tokens=5) for n, model in enumerate(models)]


def test_models_are_dealt_out_by_their_requests_and_none_twice() -> None:
    parts = list(dealt(asked(0, 0, 0, 1, 1, 2, 2, 3), 2))
    assert [sorted({each.model for each in part}) for part in parts] == [
        [model_name(0), model_name(3)],
        [model_name(1), model_name(2)],
    ]
    assert [len(part) for part in dealt(asked(0, 0), 8)] == [2], "a slot without requests is none"


def test_every_layout_serves_all_requests() -> None:
    given = asked(0, 1, 2, 0, 1, 3, 4)
    for parts in layouts(given, 4, 1).values():
        served = [each for _, part in parts for each in part]
        assert Counter(served) == Counter(given)
    assert {name: sum(sum(fleet.values()) for fleet, _ in parts) for name, parts in layouts(given, 4, 1).items()} == {
        "alone": 4,
        "split": 4,
        "together": 4,
    }


def test_popularity_is_drawn_and_the_requests_stay() -> None:
    given = asked(*range(10)) * 50
    drawn = drawn_anew(given, 20, 1.0, random.Random(3))
    assert [each.time_s for each in drawn] == [each.time_s for each in given]
    (_, first), *_, (_, last) = Counter(each.model for each in drawn).most_common()
    assert first > 5 * last
    assert drawn == drawn_anew(given, 20, 1.0, random.Random(3))


@pytest.fixture
def workloads(tmp_path: Path) -> Path:
    lines = [f"synth-4-0.1-1.0-1.0,00:00:{n:02d}.500,synth_model_{n % 4:02d},100,{5 + n}" for n in range(12)]
    path = tmp_path / "workloads.csv"
    path.write_text("\n".join(["workload,request_time,model_name,input_len,output_len", *lines]) + "\n")
    return path


def test_the_command_compares_the_three(workloads: Path) -> None:
    options = ["--models", "5", "--load-of", "3", "--zipf", "1", "--slots", "2", "--prefill-slots", "1"]
    done = CliRunner().invoke(bench.app, [str(workloads), *options, "--prompts", "2", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["layout"] for row in rows] == ["alone", "split", "together"]
    assert {(row["models"], row["requests"], row["unserved"]) for row in rows} == {(5, 9, 0)}
    assert all(0 < row["service_attainment"] <= 1 for row in rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "9"], "no workload of 9 models"),
        (["--slots", "3"], "must be under the 3 slots"),
        (["--load-of", "3"], "needs --zipf"),
    ],
)
def test_bad_options_are_named(workloads: Path, options: list[str], words: str) -> None:
    done = CliRunner().invoke(bench.app, [str(workloads), *options])
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())
