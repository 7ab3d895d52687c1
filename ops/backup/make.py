"""Makes a backup while everything runs: one snapshot of the database, then the files that it names."""

import shutil
from pathlib import Path

from psycopg import Connection
from sqlalchemy import Connection as SqlConnection

from controlplane.errors import NotFoundError
from controlplane.settings import Settings
from controlplane.store.backups import Snapshot, take_snapshot
from controlplane.store.blobs.open import open_blobs
from controlplane.store.session import Database, make_engine
from dataplane.protocol.version import tidepool_version
from ops.backup.manifest import DATABASE, FILES, KEYS, Manifest, measure, write_manifest
from ops.backup.programs import BackupError, choose_program, find_programs, run_program, server_of
from ops.client.home import keys_file
from ops.client.screen import Progress


def make_backup(settings: Settings, folder: Path, *, with_files: bool, report: Progress) -> Manifest:
    """Fill a folder, which appears under its name when it is complete.

    Raises:
        BackupError: the folder is there already, or no pg_dump fits the server, or it failed.
        SQLAlchemyError: the database does not answer.
    """
    if folder.exists():
        raise BackupError(f"{folder} is there already: name a new folder")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, mode=0o700)
    try:
        manifest = _fill(settings, partial, with_files=with_files, report=report)
        write_manifest(partial, manifest)
        for path in partial.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def _fill(settings: Settings, folder: Path, *, with_files: bool, report: Progress) -> Manifest:
    database = Database(make_engine(settings))
    found = find_programs("pg_dump")
    try:
        with database.transaction() as session:  # its snapshot is there for pg_dump as long as it is open
            snapshot = take_snapshot(session)
            program = choose_program("pg_dump", found, least=snapshot.postgres)
            report("dumping the database", 0, None)
            _dump(program, session.connection(), snapshot, folder / DATABASE)
    finally:
        database.close()
    gone = _copy_files(settings, snapshot, folder / FILES, report) if with_files else []
    if (keys := keys_file(settings.home.expanduser())).exists():
        shutil.copyfile(keys, folder / KEYS)
    parts = sorted(path for path in folder.rglob("*") if path.is_file())
    return Manifest(
        made_at=snapshot.made_at,
        tidepool=tidepool_version(),
        schema=snapshot.schema,
        postgres=snapshot.postgres,
        dumped_by=next(each.major for each in found if each.path == program),
        system_identifier=snapshot.system_identifier,
        with_files=with_files,
        parts={str(path.relative_to(folder)): measure(path) for path in parts},
        gone=gone,
    )


def _dump(program: Path, connection: SqlConnection, snapshot: Snapshot, target: Path) -> None:
    driver = connection.connection.driver_connection
    assert isinstance(driver, Connection)
    address, secrets = server_of(driver)
    options = [
        "--format=custom",
        "--schema=public",
        "--no-owner",
        "--no-privileges",
        f"--snapshot={snapshot.name}",
        f"--file={target}",
    ]
    run_program([program, *options, f"--dbname={address}"], secrets)


def _copy_files(settings: Settings, snapshot: Snapshot, folder: Path, report: Progress) -> list[str]:
    """Copy the files that the snapshot names. Returns those that were deleted since."""
    blobs, gone = open_blobs(settings), []
    folder.mkdir(mode=0o700)
    for count, file_id in enumerate(snapshot.files):
        report("copying files", count, len(snapshot.files))
        try:
            source = blobs.open(file_id)
        except NotFoundError:
            gone.append(file_id)
            continue
        with (folder / file_id).open("wb") as target:
            target.writelines(blobs.chunks(source))
    return gone
