"""`tidepool backup` and `restore` on real servers: what was there comes back, and what would do harm is refused."""

import json
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

import migrations
from controlplane.settings import Settings
from controlplane.store.backups import Target
from controlplane.store.blobs.base import BlobStore
from controlplane.store.files import add_file
from controlplane.store.session import Database, make_engine
from controlplane.store.terms import current_term, newest_known, note_reported, raise_term
from ops.backup import restore
from ops.backup.manifest import MANIFEST, Manifest
from ops.backup.programs import BackupError, Program, choose_program
from ops.backup.restore import restore_fault
from ops.local.postgres_cluster import PostgresCluster
from tests.controlplane.conftest import blobs
from tests.controlplane.databases import Databases
from tests.ops.cli.conftest import restored_logs, run
from tests.ops.cli.running import Run

__all__ = ["blobs", "restored_logs", "run"]
ROWS = "SELECT id, filename, bytes FROM files ORDER BY id"


@pytest.fixture
def filled(
    run: Run,
    settings: Settings,
    database: Database,
    blobs: BlobStore,
    monkeypatch: pytest.MonkeyPatch,
    restored_logs: None,
) -> Run:
    """Commands of an installation with two files, of which one's bytes are gone, and keys."""
    monkeypatch.setenv("TIDEPOOL_DATABASE_URL", settings.database_url.get_secret_value())
    with database.transaction() as session:
        for name in ("file-1", "file-2"):
            keep = timedelta(days=1)
            add_file(
                session, file_id=name, tenant="acme", filename=name, purpose="batch", size_bytes=len(name), keep=keep
            )
    with blobs.writing("file-1") as stream:
        stream.write(b"file-1")
    (settings.home / "keys.json").write_text(json.dumps({"admin": "tp-admin-secret"}))
    return run


@pytest.fixture
def elsewhere(databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A new home and a database without tables, which commands use from now on once `use` was called."""
    url = databases.copy()
    address = url.render_as_string(hide_password=False)
    database = Database(make_engine(Settings(database_url=address)))
    with database.transaction() as session:
        for command in ("DROP SCHEMA public CASCADE", "CREATE SCHEMA public", "DROP SCHEMA first_rows CASCADE"):
            session.execute(text(command))
    yield database
    database.close()
    databases.drop(url)


def use(database: Database, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database.engine.dispose()  # a process that is connected is in the way of a restore
    monkeypatch.setenv("TIDEPOOL_DATABASE_URL", database.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("TIDEPOOL_HOME", str(home))


def test_what_was_backed_up_comes_back(
    filled: Run, database: Database, elsewhere: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, home = tmp_path / "backup", tmp_path / "other"
    made = filled("backup", folder, "--json")
    assert made.status == 0, made.err
    assert (made.json["gone"], made.json["schema"]) == (["file-2"], migrations.revisions()[0])
    assert not (tmp_path / "backup.partial").exists()
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.rglob("*")))
    use(elsewhere, home, monkeypatch)
    assert filled("restore", folder, "--check").status == 0
    monkeypatch.setattr(Path, "chmod", lambda *_: None)  # files are nobody else's from their first moment
    restored = filled("restore", folder)
    assert restored.status == 0, restored.err
    assert "start the processes; agents need no restart" in restored.err
    with database.transaction() as old, elsewhere.transaction() as new:
        assert old.execute(text(ROWS)).all() == new.execute(text(ROWS)).all() != []
    assert (home / "files" / "file-1").read_bytes() == b"file-1"
    assert json.loads((home / "keys.json").read_text()) == {"admin": "tp-admin-secret"}
    assert (home / "keys.json").stat().st_mode & 0o077 == 0


def test_a_database_that_holds_something_is_refused_unless_told(
    filled: Run, database: Database, elsewhere: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert filled("backup", tmp_path / "backup").status == 0
    assert "is there already" in filled("backup", tmp_path / "backup").err
    use(elsewhere, tmp_path / "other", monkeypatch)
    assert filled("restore", tmp_path / "backup").status == 0
    with elsewhere.transaction() as session:
        session.execute(text("UPDATE files SET filename = 'changed'"))
        refused = filled("restore", tmp_path / "backup", "--replace")
        assert "1 connections of Tidepool's processes are open" in refused.err
    elsewhere.engine.dispose()
    refused = filled("restore", tmp_path / "backup")
    assert (refused.status, "--replace" in refused.err) == (1, True)
    with elsewhere.transaction() as session:
        assert {row.filename for row in session.execute(text(ROWS))} == {"changed"}
        before = newest_known(session)
        raise_term(session, above=6, why="promotions since the backup")
        note_reported(session, 9)
    elsewhere.engine.dispose()
    assert filled("restore", tmp_path / "backup", "--replace").status == 0
    with elsewhere.transaction() as session:
        assert {row.filename for row in session.execute(text(ROWS))} == {"file-1", "file-2"}
        assert (before, current_term(session)) == (2, 10), "nodes that saw the former database's terms obey this one"


@pytest.mark.parametrize("at", ["_load", "_begin_term"])
def test_a_restore_that_is_cut_off_and_run_again_goes_above_the_former_terms(
    filled: Run, elsewhere: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    folder = tmp_path / "backup"
    assert filled("backup", folder).status == 0
    use(elsewhere, tmp_path / "other", monkeypatch)
    assert filled("restore", folder).status == 0
    with elsewhere.transaction() as session:
        raise_term(session, above=499, why="promotions since the backup")
    elsewhere.engine.dispose()

    def cut_off(*_: object, **_named: object) -> None:
        raise BackupError("cut off")

    with monkeypatch.context() as broken:
        broken.setattr(restore, at, cut_off)
        assert filled("restore", folder, "--replace").status == 1
    again = filled("restore", folder, "--replace")
    assert again.status == 0, again.err
    with elsewhere.transaction() as session:
        assert current_term(session) == 501, "nodes that saw the former database's terms obey this one"


@pytest.mark.parametrize("part", ["database.dump", "files/file-1", "keys.json", MANIFEST])
def test_a_damaged_backup_changes_nothing(
    filled: Run, elsewhere: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    folder = tmp_path / "backup"
    assert filled("backup", folder).status == 0
    (folder / part).write_bytes((folder / part).read_bytes()[:-3])
    use(elsewhere, tmp_path / "other", monkeypatch)
    refused = filled("restore", folder)
    assert (refused.status, part in refused.err) == (1, True), refused.err
    with elsewhere.transaction() as session:
        assert session.execute(text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")).scalar_one() == 0


def test_files_may_be_left_out(filled: Run, tmp_path: Path) -> None:
    assert filled("backup", tmp_path / "backup", "--no-files").status == 0
    assert not (tmp_path / "backup" / "files").exists()


def test_a_backup_that_fails_leaves_nothing(filled: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr("ops.backup.programs.postgres_binary", lambda name: tmp_path / name)
    refused = filled("backup", tmp_path / "backup")
    assert (refused.status, "there is no pg_dump" in refused.err) == (1, True)
    assert not list(tmp_path.glob("backup*"))


def test_a_home_without_an_installation_stays_as_it_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_logs: None
) -> None:
    monkeypatch.delenv("TIDEPOOL_DATABASE_URL", raising=False)
    home = tmp_path / "mistyped"
    refused = run("backup", tmp_path / "backup", "--home", home)
    assert refused.status == 1
    assert f"{home} (TIDEPOOL_HOME) holds no installation, and TIDEPOOL_DATABASE_URL is not set" in refused.err
    assert list(tmp_path.iterdir()) == []


def test_a_home_of_several_regions_is_backed_up(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_logs: None
) -> None:
    """From the primary, which is started for the command; files and keys are shared by the regions."""
    monkeypatch.delenv("TIDEPOOL_DATABASE_URL", raising=False)
    home = tmp_path / "home"
    PostgresCluster(home, ("us-east", "us-west"), fsync=False).prepare(migrations.upgrade)
    made = run("backup", tmp_path / "backup", "--home", home, "--json")
    assert made.status == 0, made.err
    assert made.json["schema"] == migrations.revisions()[0]
    assert not (home / "postgres").exists(), "no server of another home is made"


def test_the_program_fits_the_server() -> None:
    old, new = Program(path=Path("/15/pg_dump"), major=15), Program(path=Path("/18/pg_dump"), major=18)
    assert choose_program("pg_dump", [new, old], least=15) == old.path
    assert choose_program("pg_dump", [new, old], least=16) == new.path
    with pytest.raises(BackupError, match=r"of PostgreSQL 18 or newer is needed, and /15/pg_dump is of PostgreSQL 15"):
        choose_program("pg_dump", [old], least=18)


def test_a_backup_of_a_newer_release_is_refused() -> None:
    manifest = Manifest(
        made_at="",
        tidepool=None,
        schema="9999",
        postgres=18,
        dumped_by=18,
        system_identifier="",
        with_files=True,
        parts={},
    )
    empty = Target(postgres=18, tables=0, others=0)
    assert "schema 9999" in (restore_fault(manifest, empty, ("0002", "0001"), replace=True) or "")
    assert restore_fault(manifest, empty, ("9999",), replace=False) is None
