"""`tidepool alias`, `tidepool rollout` and `tidepool model add --like`."""

from pathlib import Path

import pytest

from tests.ops.cli.running import Run
from tests.ops.local.test_checkpoints import write_checkpoint


@pytest.fixture
def revised(fleet: Run, tmp_path: Path) -> Run:
    """`fleet` with m-2, which is like m."""
    added = fleet("model", "add", "m-2", "--path", write_checkpoint(tmp_path / "again"), "--like", "m")
    assert added.status == 0, added.err
    assert "profiles: H800; regions: us-east" in added.out
    return fleet


def test_a_model_takes_over_profiles_and_regions(revised: Run, tmp_path: Path) -> None:
    shown = revised("model", "show", "m-2", "--json").json
    like = revised("model", "show", "m", "--json").json
    [profile], [endpoint] = shown["profiles"], shown["endpoints"]
    assert profile == like["profiles"][0] | {"model": "m-2"}
    assert (endpoint["region"], endpoint["instances_min"], endpoint["instances_max"]) == ("us-east", 0, 4)
    own = ("--tokens-per-s", "H800=7", "--region", "us-east", "--min", "1")
    revised("model", "add", "m-3", "--path", write_checkpoint(tmp_path / "third"), "--like", "m", *own)
    third = revised("model", "show", "m-3", "--json").json
    assert [row["tokens_per_s"] for row in third["profiles"]] == [7.0], "what is named is not taken over"
    assert [row["instances_min"] for row in third["endpoints"]] == [1]
    unknown = revised("model", "add", "m-4", "--path", tmp_path / "third", "--like", "nobody")
    assert unknown.status == 1
    assert "nobody" in unknown.err
    assert revised("model", "show", "m-4").status == 1, "nothing was registered"


def test_an_alias_by_hand(revised: Run) -> None:
    assert revised("alias", "put", "chat", "m=3", "m-2").out == "chat is m 75%, m-2 25%\n"
    assert "m 75%, m-2 25%" in revised("alias", "list").out
    assert "m-2 25%" in revised("alias", "show", "chat").out
    bad = revised("alias", "put", "chat", "m=much")
    assert (bad.status, "whole number" in bad.err) == (2, True)
    assert "'nobody' is not registered" in revised("alias", "put", "chat", "nobody").err
    in_use = revised("model", "delete", "m-2", "--yes")
    assert in_use.status == 1
    assert revised("alias", "delete", "chat").out == "alias chat is deleted\n"


def test_a_roll_out_from_its_start_to_its_end(revised: Run) -> None:
    started = revised("rollout", "start", "m", "m-2", "--steps", "10,100", "--hold", "5s", "--answers", "7")
    assert "m becomes m-2 in steps of 10 %, 100 %" in started.out
    shown = revised("rollout", "show", "latest", "--json").json
    assert (shown["steps"], shown["hold_s"], shown["answers_min"]) == ([10, 100], 5.0, 7)
    assert "waits for its first look" in revised("rollout", "show", shown["id"][:20]).out
    assert shown["id"] in revised("alias", "list", "--json").out
    assert "paused" in revised("rollout", "pause", "latest").out
    assert "goes on" in revised("rollout", "resume", "latest").out
    assert revised("rollout", "promote", "latest").status == 0
    assert "rolled back by admin" in revised("rollout", "rollback", "latest").out
    again = revised("rollout", "rollback", "latest")
    assert (again.status, "is rolled_back" in again.err) == (1, True)
    assert revised("rollout", "list", "--live", "--json").json["data"] == []
    followed = revised("rollout", "show", "latest", "--follow")
    assert (followed.status, "rolled back by admin" in followed.out) == (1, True), "it went back"
    told = revised("events", "--kind", "rollout", "--json").json["data"]
    assert [event["what"] for event in told] == ["rolled back", "resumed", "paused", "started"]


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--steps", "a,b"), "list of percents"), (("--steps", "50,20"), "must rise"), (("--hold", "soon"), "duration")],
)
def test_bad_options_name_what_is_wrong(revised: Run, options: tuple[str, ...], words: str) -> None:
    assert words in revised("rollout", "start", "m", "m-2", *options).err
