"""`apply --prune` against a real API."""

from pathlib import Path

import pytest

from tests.ops.cli.running import Run
from tests.ops.cli.test_apply import EXAMPLE, TOMORROW, pinned


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "fleet.yaml"


def names(run: Run, noun: str) -> list[str]:
    return [row["name"] for row in run(noun, "list", "--json").json["data"]]


def test_all_that_a_file_made_is_pruned_and_nothing_made_by_hand(served: Run, file: Path) -> None:
    assert served("region", "add", "by-hand").status == 0
    file.write_text(pinned(TOMORROW))
    assert served("apply", "-f", file).status == 0
    assert {row["owner"] for row in served("model", "list", "--json").json["data"]} == {"apply"}
    assert served("apply", "-f", file, "--prune").out == "nothing to change\n"
    file.write_text("tenants: {team-b: {}}\n")
    planned = served("apply", "-f", file, "--prune", "--dry-run")
    assert planned.status == 0, planned.out
    assert "- endpoint qwen3-8b / us-east\n" in planned.out
    refused = served("apply", "-f", file, "--prune")
    assert refused.status == 1
    assert "nothing is changed without --yes" in refused.err
    assert "team-b" not in names(served, "tenant")
    done = served("apply", "-f", file, "--prune", "--yes")
    assert done.status == 0, done.out
    assert "- model qwen3-8b\n" in done.out
    assert names(served, "region") == ["by-hand"]
    assert names(served, "model") == names(served, "gpu") == []
    assert names(served, "tenant") == ["team-b"]
    assert served("pin", "list", "--json").json["data"] == []
    assert served("apply", "-f", file, "--prune", "--yes").out == "nothing to change\n"
    for nothing in ("", "# a comment\n", "---\n"):
        file.write_text(nothing)
        refused = served("apply", "-f", file, "--prune", "--yes")
        assert (refused.status, names(served, "tenant")) == (1, ["team-b"])
        assert "fleet.yaml is empty: write {} in it" in refused.err
    assert "endpoint.delete" in served("audit").out


def test_what_a_file_only_changed_is_not_pruned_unless_adopted(served: Run, file: Path) -> None:
    served("gpu", "add", "L4", "--memory-gib", 24, "--cost-per-hour", 1)
    bytes_ = 24 << 30
    text = f"gpu_types: {{L4: {{memory_bytes: {bytes_}, cost_per_hour: 2}}}}\n"
    file.write_text(text)
    assert "cost_per_hour: 1.0 -> 2.0" in served("apply", "-f", file).out
    file.write_text("{}\n")
    assert served("apply", "-f", file, "--prune", "--yes").out == "nothing to change\n"
    file.write_text(text)
    assert "owner: none -> apply" in served("apply", "-f", file, "--adopt").out
    assert served("apply", "-f", file, "--adopt").out == "nothing to change\n"
    file.write_text("{}\n")
    assert served("apply", "-f", file, "--prune", "--yes").out == "- GPU type L4\n1 changed\n"


def test_two_owners_do_not_touch_each_other(served: Run, file: Path) -> None:
    file.write_text("owner: one\nregions: {r1: {position: 1}}\n")
    assert served("apply", "-f", file).status == 0
    file.write_text("regions: {r2: {}, r1: {position: 5}}\nlatencies: {r2: {r1: 10}}\n")
    outcome = served("apply", "-f", file, "--owner", "two")
    assert outcome.status == 1
    assert "~ region r1: FAILED" in outcome.out
    assert "it belongs to 'one'" in outcome.out
    assert names(served, "region") == ["r1", "r2"]
    file.write_text("{}\n")
    outcome = served("apply", "-f", file, "--owner", "one", "--prune", "--yes")
    assert outcome.status == 1
    assert "it is needed by latency r2 / r1, which stays" in outcome.out
    assert served("apply", "-f", file, "--owner", "two", "--prune", "--yes").status == 0
    assert names(served, "region") == ["r1"]
    assert served("apply", "-f", file, "--owner", "one", "--prune", "--yes").status == 0
    assert names(served, "region") == []


def test_what_was_made_again_by_hand_is_not_pruned(served: Run, file: Path) -> None:
    file.write_text("regions: {r1: {}}\n")
    assert served("apply", "-f", file).status == 0
    assert served("region", "delete", "r1", "--yes").status == 0
    assert served("region", "add", "r1").status == 0
    file.write_text("{}\n")
    assert served("apply", "-f", file, "--prune", "--yes").out == "nothing to change\n"
    assert names(served, "region") == ["r1"]


def test_an_owner_that_is_no_name_is_refused(served: Run) -> None:
    outcome = served("apply", "-f", EXAMPLE, "--owner", "No Name")
    assert outcome.status != 0
    assert "--owner" in outcome.err
