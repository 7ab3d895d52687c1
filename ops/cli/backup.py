"""`backup` and `restore`: the database, the files and the keys of an installation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.processes import running
from ops.client.api import CommandError
from ops.client.screen import AsJson, bytes_text, print_answer, progress_bar

Home = Annotated[Path, typer.Option(envvar="TIDEPOOL_HOME", help="The home folder.", file_okay=False)]
_AFTER = (
    "next: empty Redis (redis-cli FLUSHALL) and start the processes; agents need no restart; what was accepted after"
    " {made_at} is lost"
)


@examples(
    "tidepool backup /backups/2026-11-24", "tidepool backup /backups/today --no-files   # the bucket is replicated"
)
def backup(
    folder: Annotated[Path, typer.Argument(help="A new folder, which holds keys: keep it closed to others.")],
    home: Home = Path("~/.tidepool"),
    no_files: Annotated[
        bool, typer.Option("--no-files", help="Leave the files out: their bucket is backed up by other means.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Back up the database, the files and keys.json while everything runs.

    \b
    The database is dumped as of one moment, by pg_dump; the files that it names then follow. The folder appears
    under its name when it is complete, with a manifest of checksums.
    """
    from ops.backup.make import make_backup
    from ops.local.reachable import reachable_database

    with (
        _telling_faults(),
        reachable_database(home.expanduser(), new=False) as settings,
        progress_bar("backing up") as report,
    ):
        manifest = make_backup(settings, folder.absolute(), with_files=not no_files, report=report)
    parts = len(manifest.parts)
    text = f"{folder} is a backup of {manifest.made_at}: {parts} files, {bytes_text(manifest.total_bytes)}"
    print_answer(_summary(folder, manifest), text, as_json=as_json)


@examples("tidepool restore /backups/2026-11-24", "tidepool restore /backups/2026-11-24 --check")
def restore(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A folder that `backup` made.")],
    home: Home = Path("~/.tidepool"),
    replace: Annotated[
        bool, typer.Option("--replace", help="Drop all that the database holds. Without it only an empty one is taken.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare the checksums, and restore nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Restore a backup while no process of Tidepool runs, and migrate it to this release's schema.

    \b
    The checksums are compared before anything is changed. keys.json is kept where there is one.
    """
    from ops.backup.restore import check_backup, restore_backup
    from ops.local.reachable import reachable_database

    with _telling_faults():
        if check:
            with progress_bar("checking") as report:
                manifest = check_backup(folder, report)
        else:
            with reachable_database(home.expanduser(), new=True) as settings, progress_bar("restoring") as report:
                manifest = restore_backup(settings, folder, replace=replace, report=report)
    done = "is complete and undamaged" if check else "is restored"
    print_answer(_summary(folder, manifest), f"the backup of {manifest.made_at} {done}", as_json=as_json)
    if not check:
        typer.echo(_AFTER.format(made_at=manifest.made_at), err=True)


def _summary(folder: Path, manifest: Any) -> dict[str, Any]:
    import msgspec

    told: dict[str, Any] = msgspec.to_builtins(manifest)
    told["parts"] = len(manifest.parts)
    return {"folder": str(folder), "bytes": manifest.total_bytes, **told}


@contextmanager
def _telling_faults() -> Iterator[None]:
    from controlplane.errors import UnavailableError
    from ops.backup.programs import BackupError

    with running():
        try:
            yield
        except (BackupError, UnavailableError) as error:
            raise CommandError(str(error)) from error
