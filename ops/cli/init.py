"""`init`: the first keys of an installation whose processes run apart."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ops.cli.examples import examples
from ops.cli.processes import running
from ops.client.api import CommandError
from ops.client.screen import AsJson, print_json

_NEXT = """
next:
  export TIDEPOOL_NODE_KEY=$(tidepool key secret node)      for api, dispatcher and worker, on each machine
  tidepool api & tidepool dispatcher & tidepool worker & tidepool forecaster & tidepool beat
  tidepool status                                           takes the admin key of keys.json by itself
  tidepool key create n1 --role node --node n1              a key for each node's agent (TIDEPOOL_AGENT_NODE_KEY)"""


@examples(
    "TIDEPOOL_DATABASE_URL=postgres://me:secret@db/tidepool tidepool init --migrate",
    "tidepool init --print | jq -r .admin",
)
def init(
    home: Annotated[Path, typer.Option(envvar="TIDEPOOL_HOME", help="Folder for keys.json.", file_okay=False)] = Path(
        "~/.tidepool"
    ),
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Migrate the database to the newest schema first.")
    ] = False,
    to_stdout: Annotated[
        bool, typer.Option("--print", help="Print new secrets as JSON and write no file: for a secrets manager.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Create new keys although the database has first keys, which become unusable."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create the first keys (admin, client, node) without `tidepool up`. Safe to run twice.

    \b
    Their secrets are written to keys.json of the home folder (mode 0600), their hashes to TIDEPOOL_DATABASE_URL.
    """
    with running():
        secrets, made, faults = _make(home.expanduser(), migrate=migrate, to_stdout=to_stdout, force=force)
    if faults:
        raise CommandError("; ".join(faults))
    if to_stdout:
        print_json(secrets)
        return
    file = str(home.expanduser() / "keys.json")
    if as_json:
        print_json({"keys_file": file, "made": made})
        return
    typer.echo(f"{file} holds the keys admin, client and node" + (f"; new: {', '.join(made)}" if made else ""))
    typer.echo(_NEXT, err=True)


def _make(home: Path, *, migrate: bool, to_stdout: bool, force: bool) -> tuple[dict[str, str], list[str], list[str]]:
    """The secrets, the roles whose keys are new, and faults of the other keys."""
    import migrations
    from controlplane.settings import Settings
    from controlplane.store.schema import check_schema
    from controlplane.store.session import Database, make_engine
    from ops.client.home import read_secrets, refuse_home_of_up
    from ops.local.bootstrap import is_bootstrapped, keep_secrets, make_secrets, store_keys

    refuse_home_of_up(home, os.environ)
    settings = Settings()
    if migrate:
        migrations.upgrade(settings.database_url.get_secret_value())
    database = Database(make_engine(settings))
    try:
        check_schema(database)
        with database.transaction() as session:
            if (to_stdout or not read_secrets(home)) and is_bootstrapped(session) and not force:
                raise CommandError(
                    f"the database has its first keys already, and {home / 'keys.json'} is not where they are:"
                    " copy that file here, or make new keys with --force"
                )
            keys = make_secrets({}) if to_stdout else keep_secrets(home)
            faults = store_keys(session, keys)
    finally:
        database.close()
    return keys.secrets, sorted(keys.fresh), faults
