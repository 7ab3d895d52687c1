"""`apply` and `export` against a real API."""

import io
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ops.deploy import __file__ as deploy_file
from tests.ops.cli.running import Run

EXAMPLE = Path(deploy_file).with_name("fleet.yaml")


def pinned(until: datetime) -> str:
    """The example with a pin in eu-west."""
    limits = "{instances_min: 0, instances_max: 4"
    text = EXAMPLE.read_text()
    assert limits in text
    return text.replace(limits, f"{limits}, pin: {{instances: 3, until: {until.isoformat()}, note: launch week}}")


TOMORROW = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)


def test_the_example_is_applied_once_and_exported(served: Run, tmp_path: Path) -> None:
    planned = served("apply", "-f", EXAMPLE, "--dry-run")
    assert planned.status == 0, planned.err
    assert "+ endpoint qwen3-8b / us-east\n" in planned.out
    assert "nothing was changed" in planned.out
    assert served("region", "list", "--json").json["data"] == []
    made = served("apply", "-f", EXAMPLE, "--json")
    assert made.status == 0, made.out
    assert {change["state"] for change in made.json["changes"]} == {"done"}
    assert {change["action"] for change in made.json["changes"]} == {"create"}
    assert served("apply", "-f", EXAMPLE).out == "nothing to change\n"
    exported = tmp_path / "exported.yaml"
    exported.write_text(served("export").out)
    assert served("apply", "-f", exported).out == "nothing to change\n"
    assert "model.put" in served("audit").out


def test_what_is_exported_makes_the_same_fleet_again(
    fleet: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = fleet("export").out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert fleet("apply", "-f", "-").out == "nothing to change\n"
    assert fleet("endpoint", "delete", "m", "us-east", "--yes").status == 0
    assert fleet("model", "delete", "m", "--yes").status == 0
    exported = tmp_path / "exported.yaml"
    exported.write_text(text)
    outcome = fleet("apply", "-f", exported, "--json")
    assert outcome.status == 0, outcome.out
    assert [change["kind"] for change in outcome.json["changes"]] == ["model", "profile", "endpoint"]
    assert fleet("export").out == text


def test_a_field_that_changes_is_shown_with_both_values(served: Run, tmp_path: Path) -> None:
    changed = tmp_path / "changed.yaml"
    text = pinned(TOMORROW)
    changed.write_text(text)
    assert served("apply", "-f", changed).status == 0
    assert served("apply", "-f", changed).out == "nothing to change\n"
    changed.write_text(text.replace("cost_per_hour: 2.5", "cost_per_hour: 3").replace("{instances: 3", "{instances: 5"))
    out = served("apply", "-f", changed).out
    assert "~ GPU type H800\n    cost_per_hour: 2.5 -> 3.0\n" in out
    assert "~ pin qwen3-8b / eu-west\n    instances: 3 -> 5\n" in out
    assert out.endswith("2 changed\n")
    assert [pin["instances"] for pin in served("pin", "list", "--json").json["data"]] == [5]
    assert served("apply", "-f", changed).out == "nothing to change\n"


def test_what_the_file_does_not_name_stays(fleet: Run, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("regions: {us-west: {}}\n")
    assert fleet("apply", "-f", file).out == "+ region us-west\n1 changed\n"
    assert [row["name"] for row in fleet("region", "list", "--json").json["data"]] == ["us-east", "us-west"]
    assert fleet("apply", "-f", file).out == "nothing to change\n"


def test_a_name_that_nobody_knows_is_refused_before_anything_is_changed(served: Run, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("regions: {us-east: {}}\nlatencies: {us-east: {mars: 60000}}\n")
    outcome = served("apply", "-f", file)
    assert outcome.status == 1
    assert "latency us-east / mars: region 'mars' is neither in the file nor registered" in outcome.err
    assert served("region", "list", "--json").json["data"] == []


def test_what_is_refused_is_told_and_the_next_run_goes_on(served: Run, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(pinned(TOMORROW + timedelta(days=200)))  # later than pins may end by default
    outcome = served("apply", "-f", file)
    assert outcome.status == 1
    assert "+ pin qwen3-8b / eu-west: FAILED\n    until: " in outcome.out
    assert "1 failed, 0 not tried; run it again" in outcome.out
    assert served("tenant", "list", "--json").json["data"][0]["name"] == "team-a"
    file.write_text(pinned(TOMORROW))
    assert served("apply", "-f", file).out == "+ pin qwen3-8b / eu-west\n1 changed\n"
    assert served("apply", "-f", file).out == "nothing to change\n"


def test_a_name_that_none_may_have_is_refused_by_a_dry_run_too(fleet: Run, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("aliases: {a/../b: {targets: {m: 1}}, chat: {targets: {m: 1}}}\n")
    for arguments in (["--dry-run"], []):
        outcome = fleet("apply", "-f", file, *arguments)
        assert outcome.status == 1
        assert "+ alias a/../b: FAILED\n    name: 'a/../b': none of the parts that '/' separates may be" in outcome.out
    assert "1 changed, 1 failed, 0 not tried" in outcome.out
    assert fleet("alias", "show", "chat", "--json").json["targets"] == {"m": 1}


def test_an_ended_pin_changes_nothing(served: Run, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(pinned(TOMORROW - timedelta(days=2)))
    assert served("apply", "-f", file).status == 0
    assert served("pin", "list", "--json").json["data"] == []


def test_a_file_that_cannot_be_read_is_named(served: Run, tmp_path: Path) -> None:
    outcome = served("apply", "-f", tmp_path / "none.yaml")
    assert outcome.status == 1
    assert "none.yaml cannot be read" in outcome.err


def test_an_alias_needs_its_models_and_is_pruned_before_them(served: Run, tmp_path: Path) -> None:
    assert served("apply", "-f", EXAMPLE).status == 0
    assert served("alias", "show", "chat", "--json").json["targets"] == {"qwen3-8b": 1}
    file = tmp_path / "fleet.yaml"
    file.write_text(EXAMPLE.read_text().replace("{qwen3-8b: 1}", "{nobody: 1}"))
    refused = served("apply", "-f", file)
    assert refused.status == 1
    assert "alias chat: model 'nobody' is neither in the file nor registered" in refused.err
    file.write_text("regions: {us-east: {}}\n")
    pruned = served("apply", "-f", file, "--prune", "--yes", "--json")
    assert pruned.status == 0, pruned.out
    kinds = [change["kind"] for change in pruned.json["changes"]]
    assert kinds.index("alias") < kinds.index("model")
