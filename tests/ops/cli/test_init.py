"""`tidepool init`, and the first keys when they are rotated."""

import json
import stat
from pathlib import Path

import pytest
from sqlalchemy import text

from controlplane.settings import Settings
from controlplane.store.keys import ApiKey, find_key, rotate_key
from controlplane.store.rows import list_rows
from controlplane.store.session import Database
from ops.local.bootstrap import FirstKeys, keep_secrets, make_secrets, store_keys
from tests.ops.cli.running import Run


@pytest.fixture
def init(run: Run, settings: Settings, monkeypatch: pytest.MonkeyPatch, restored_logs: None) -> Run:
    """`init(...)`: `tidepool init` on the test's database, with an empty home."""
    monkeypatch.setenv("TIDEPOOL_DATABASE_URL", settings.database_url.get_secret_value())
    return lambda *arguments: run("init", *arguments)


def test_the_first_keys_without_up(init: Run, database: Database, tmp_path: Path) -> None:
    made = init("--json")
    assert made.status == 0
    assert made.json == {"keys_file": str(tmp_path / "keys.json"), "made": ["admin", "client", "node"]}
    kept = json.loads((tmp_path / "keys.json").read_text())
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
    with database.transaction() as session:
        rows = {role: find_key(session, secret) for role, secret in kept.items()}
        assert {role: row and row.role for role, row in rows.items()} == {role: role for role in kept}
    again = init()
    assert (again.status, "new:" in again.out) == (0, False)
    assert "tidepool key create n1 --role node --node n1" in again.err
    assert json.loads((tmp_path / "keys.json").read_text()) == kept
    with database.transaction() as session:
        assert len(list_rows(session, ApiKey, after=None, limit=20).rows) == 3


def test_for_a_secrets_manager(init: Run, database: Database, tmp_path: Path) -> None:
    secrets = init("--print").json
    assert set(secrets) == {"admin", "client", "node"}
    assert not (tmp_path / "keys.json").exists()
    with database.transaction() as session:
        assert find_key(session, secrets["admin"]) is not None
    for arguments in ((), ("--print",)):
        refused = init(*arguments)
        assert refused.status == 1
        assert "the database has its first keys already" in refused.err
    assert init("--force").status == 0
    assert (tmp_path / "keys.json").exists()


def test_a_database_without_tables(init: Run, database: Database, tmp_path: Path) -> None:
    with database.transaction() as session:
        session.execute(text("DROP SCHEMA public CASCADE"))
        session.execute(text("CREATE SCHEMA public"))
    refused = init()
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert "the database has no schema" in refused.err
    assert "run `tidepool migrate`" in refused.err
    assert not (tmp_path / "keys.json").exists()
    assert init("--migrate").status == 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_rotated_first_key_does_not_come_back(database: Database, tmp_path: Path, times: int) -> None:
    keys = keep_secrets(tmp_path)
    with database.transaction() as session:
        assert store_keys(session, keys) == []
    with database.transaction() as session:
        row = find_key(session, keys.secrets["admin"])
        assert row is not None
        for _ in range(times):
            rotate_key(session, row.id, overlap_s=0)
    with database.transaction() as session:
        faults = store_keys(session, keep_secrets(tmp_path))
        assert [fault.split(" of ")[0] for fault in faults] == ["the key 'admin'"]
        assert find_key(session, keys.secrets["admin"]) is None
    with database.transaction() as session:
        keys = make_secrets({"client": keys.secrets["client"], "node": keys.secrets["node"]})
        assert keys.fresh == {"admin"}
        assert store_keys(session, keys) == []
        assert find_key(session, keys.secrets["admin"]) is not None


def test_rotating_the_stored_key_does_not_lock_anybody_out(
    served: Run, database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEPOOL_HOME", str(settings.home))
    (settings.home / "keys.json").unlink()
    keys = keep_secrets(settings.home)
    with database.transaction() as session:
        store_keys(session, keys)
    rows = {row["name"]: row["id"] for row in served("key", "list", "--json").json["data"]}
    rotated = served("key", "rotate", rows["bootstrap-admin"], "--overlap", "0s", "--json")
    assert rotated.status == 0
    assert "has the new secret of 'admin'" in rotated.err
    assert served("key", "secret", "admin").out.strip() == rotated.json["secret"] != keys.secrets["admin"]
    assert stat.S_IMODE((settings.home / "keys.json").stat().st_mode) == 0o600
    with database.transaction() as session:
        assert find_key(session, rotated.json["secret"]) is not None
        kept = FirstKeys(secrets=keep_secrets(settings.home).secrets, fresh=frozenset())
        assert store_keys(session, kept) == []
    assert "restart `tidepool up`" in served("key", "rotate", rows["bootstrap-node"]).err
    other = served("key", "create", "dashboard", "--role", "viewer", "--json").json
    assert "keys.json" not in served("key", "rotate", other["id"]).err


def test_a_clients_key_does_not_break_status(served: Run, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEPOOL_HOME", str(settings.home))
    monkeypatch.setenv("TIDEPOOL_KEY", served("key", "create", "c", "--json").json["secret"])
    assert served("region", "list").status == 0
    monkeypatch.setenv("TIDEPOOL_HOME", "/nonexistent")
    refused = served("region", "list")
    assert refused.status == 1
    assert "the key's role is 'client' (403); the key is from TIDEPOOL_KEY: set TIDEPOOL_ADMIN_KEY" in refused.err
    assert "no key 'client': run `tidepool init`" in served("key", "secret", "client").err


def test_a_home_of_up_is_sent_to_up(run: Run, tmp_path: Path, restored_logs: None) -> None:
    assert "run `tidepool init`" in run("key", "secret", "client").err
    (tmp_path / "embedded.json").write_text("{}")
    assert "has no key 'client': restart `tidepool up`" in run("key", "secret", "client").err
    for command in (("init", "--force"), ("migrate",)):
        refused = run(*command)
        assert refused.status == 1
        assert "is that of `tidepool up`" in refused.err
        assert "TIDEPOOL_DATABASE_URL" in refused.err
