"""Restores a backup: the manifest is checked first, and a database that holds something is refused."""

import shutil
from pathlib import Path

from psycopg import Connection
from sqlalchemy import Connection as SqlConnection

import migrations
from controlplane.settings import Settings
from controlplane.store.backups import Target, empty_database, read_target
from controlplane.store.blobs.open import open_blobs
from controlplane.store.session import Database, make_engine
from controlplane.store.terms import keep_newest, newest_known, raise_term
from ops.backup.manifest import DATABASE, FILES, KEYS, Manifest, damaged, file_parts, read_manifest
from ops.backup.programs import BackupError, choose_program, find_programs, run_program, server_of
from ops.client.home import keys_file, write_secret
from ops.client.screen import Progress

_DAMAGED_SHOWN = 3


def check_backup(folder: Path, report: Progress) -> Manifest:
    """The manifest of a backup whose parts are all as they were written.

    Raises:
        BackupError: something is missing or damaged.
    """
    manifest = read_manifest(folder)
    done, wrong = 0, []
    for size, fault in damaged(folder, manifest):
        done += size
        report("checking the backup", done, manifest.total_bytes)
        wrong += [fault] if fault is not None else []
    if wrong:
        more = f" and {len(wrong) - _DAMAGED_SHOWN} more" if len(wrong) > _DAMAGED_SHOWN else ""
        raise BackupError(f"the backup is damaged: {'; '.join(wrong[:_DAMAGED_SHOWN])}{more}")
    return manifest


def restore_fault(manifest: Manifest, target: Target, known: tuple[str, ...], *, replace: bool) -> str | None:
    """Why a backup is not restored into a database; None: it may be."""
    if manifest.schema not in known:
        return f"the backup has schema {manifest.schema}, this release knows up to {known[0]}: install a newer release"
    if target.others:
        return f"{target.others} connections of Tidepool's processes are open: stop the processes first"
    if target.tables and not replace:
        return f"the database has {target.tables} tables: name an empty one, or drop all that it holds with --replace"
    return None


def restore_backup(settings: Settings, folder: Path, *, replace: bool, report: Progress) -> Manifest:
    """Restore files, keys and database, migrate it to this release's schema, and begin a term. The files come first, so
    that the database names none that is not there; the database comes in one transaction.

    Raises:
        BackupError: the backup is damaged, or the database refuses, or is in use.
        SQLAlchemyError: the database does not answer.
    """
    manifest = check_backup(folder, report)
    database = Database(make_engine(settings))
    try:
        with database.transaction() as session:
            target = read_target(session)
        if (fault := restore_fault(manifest, target, migrations.revisions(), replace=replace)) is not None:
            raise BackupError(fault)
        program = choose_program("pg_restore", find_programs("pg_restore"), least=manifest.dumped_by)
        _restore_files(settings, folder, manifest, report)
        report("restoring the database", 0, None)
        with database.transaction() as session:
            before = newest_known(session)
            if target.tables:
                empty_database(session)
                keep_newest(session, before)
        with database.engine.connect() as connection:
            _load(program, connection, folder / DATABASE)
    finally:
        database.close()
    migrations.upgrade(settings.database_url.get_secret_value())
    _begin_term(settings, above=before)
    return manifest


def _begin_term(settings: Settings, *, above: int) -> None:
    """Nodes obey the restored database, although they have seen the terms of the one that it replaces."""
    database = Database(make_engine(settings))
    try:
        with database.transaction() as session:
            raise_term(session, above=above, why="a backup was restored")
    finally:
        database.close()


def _load(program: Path, connection: SqlConnection, dump: Path) -> None:
    driver = connection.connection.driver_connection
    assert isinstance(driver, Connection)
    address, secrets = server_of(driver)
    options = ["--schema=public", "--no-owner", "--no-privileges", "--exit-on-error", "--single-transaction"]
    run_program([program, *options, f"--dbname={address}", dump], secrets)


def _restore_files(settings: Settings, folder: Path, manifest: Manifest, report: Progress) -> None:
    """Files that are there already are written again; keys.json is kept where there is one."""
    names = file_parts(manifest)
    blobs = open_blobs(settings)
    for count, file_id in enumerate(names):
        report("restoring files", count, len(names))
        with (folder / FILES / file_id).open("rb") as source, blobs.writing(file_id) as target:
            shutil.copyfileobj(source, target)
    kept = keys_file(settings.with_home())
    if KEYS in manifest.parts and not kept.exists():
        write_secret(kept, (folder / KEYS).read_text())
