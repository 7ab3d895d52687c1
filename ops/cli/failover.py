"""`failover`: makes a region's standby of Postgres the primary, by an operator's word."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ops.cli.examples import examples
from ops.cli.processes import running
from ops.client.api import CommandError
from ops.client.screen import AsJson, print_answer


@examples("tidepool failover us-west --dry-run", "tidepool failover us-west")
def failover(
    region: Annotated[str, typer.Argument(help="The region whose server becomes the primary: its cluster_name.")],
    home: Annotated[Path, typer.Option(envvar="TIDEPOOL_HOME", help="The home folder.", file_okay=False)] = Path(
        "~/.tidepool"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would mean, and change nothing.")] = False,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Do it although acknowledged work may be lost; it says which.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a region's standby of Postgres the primary, and have the other standbys follow it.

    \b
    For two regions, or where nothing like Patroni decides. TIDEPOOL_DATABASE_URL names every server of the cluster.
    Refuses while a primary takes writes, and where something that was acknowledged may be lost; says what.
    """
    with running():
        from psycopg import Error

        from controlplane.errors import InvalidValueError
        from ops.failover.run import decide, fail_over
        from ops.local.addresses import installed_settings

        url = installed_settings(home.expanduser()).database_url.get_secret_value()
        try:
            if dry_run:
                decision = decide(url, region)
                reasons = [*decision.obstacles, *decision.losses] or ["nothing that was acknowledged would be lost"]
                print_answer(asdict(decision), "\n".join(reasons), as_json=as_json)
                return
            done = fail_over(url, region, accept_loss=accept_loss, report=lambda line: typer.echo(line, err=True))
        except (InvalidValueError, Error, TimeoutError) as error:
            raise CommandError(str(error).strip()) from error
    text = [f"region {region} is the primary, after {done.promoted_after_s:.2f} s"]
    text += [f"lost, perhaps: {one}" for one in done.accepted]
    text += [f"{address} does not follow: {why}" for address, why in done.left.items()]
    print_answer(asdict(done), "\n".join(text), as_json=as_json)
