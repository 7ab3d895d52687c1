"""`tidepool key` and `tidepool tenant`."""

import pytest

from tests.ops.cli.running import Run


def test_keys(served: Run) -> None:
    made = served("key", "create", "ci", "--role", "viewer")
    secret = made.out.strip()
    assert served("--key", secret, "region", "list").status == 0
    assert "(403)" in served("--key", secret, "region", "add", "a").err
    rows = served("key", "list", "--json").json["data"]
    assert [row["name"] for row in rows] == ["admin", "ci"]
    assert secret not in served("key", "list").out
    assert served("key", "revoke", rows[1]["id"], "--json").json["revoked_at"]
    assert "(409)" in served("key", "revoke", rows[0]["id"]).err


def test_keys_that_may_do_less_and_rotation(served: Run) -> None:
    narrow = ("--scope", "files", "--scope", "models", "--model", "a", "--model", "b")
    made = served("key", "create", "nightly", *narrow, "--json").json
    assert (made["scopes"], made["models"]) == (["files", "models"], ["a", "b"])
    assert "files, models" in served("key", "list").out
    node = served("key", "create", "n7", "--role", "node", "--node", "node-7", "--json").json
    assert node["node"] == "node-7"
    assert "only keys of the role" in served("key", "create", "n8", "--node", "node-8").err
    rotated = served("key", "rotate", made["id"], "--overlap", "2d")
    assert rotated.out.strip() != made["secret"]
    assert "the old secret works until" in rotated.err
    row = next(row for row in served("key", "list", "--json").json["data"] if row["id"] == made["id"])
    assert row["prefix"] == rotated.out[:14]


@pytest.mark.parametrize("wrong", ["", "1", "h", "1.5h", "-1h", "1w", "\u0663h"])
def test_the_overlap_of_a_rotation_is_a_duration(run: Run, wrong: str) -> None:
    assert run("key", "rotate", "key_0", "--overlap", wrong).status == 2


def test_tenants(served: Run) -> None:
    assert "default limits" in served("tenant", "show", "team-a").out
    set_up = ("tenant", "set", "team-a", "--requests-per-minute", 600, "--concurrent-max", 5, "--json")
    assert served(*set_up).json["requests_per_minute"] == 600
    changed = served("tenant", "set", "team-a", "--concurrent-max", "none", "--tokens-per-minute", 1000, "--json").json
    limits = {name: changed[name] for name in ("requests_per_minute", "tokens_per_minute", "concurrent_max")}
    assert limits == {"requests_per_minute": 600, "tokens_per_minute": 1000, "concurrent_max": None}
    assert "600" in served("tenant", "show", "team-a").out
    assert [row["name"] for row in served("tenant", "list", "--json").json["data"]] == ["team-a"]
    assert served("tenant", "set", "team-a", "--concurrent-max", "many").status == 2
    assert "(400)" in served("tenant", "set", "team-a", "--concurrent-max", "0").err
    assert "default limits" in served("tenant", "reset", "team-a").out
    assert served("tenant", "show", "team-a", "--json").json["is_default"] is True
