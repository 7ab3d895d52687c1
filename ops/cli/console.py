"""`console`: a way into the web console."""

import json

import typer

from ops.cli.examples import examples
from ops.client.api import connected
from ops.client.console import sign_in_link
from ops.client.screen import AsJson


@examples("tidepool console", "tidepool --url https://tide.example console")
def show_console(context: typer.Context, as_json: AsJson = False) -> None:
    """Print a link to the web console that signs in once, within ten minutes, with the rights of the admin key."""
    with connected(context) as api:
        link = sign_in_link(api)
    typer.echo(json.dumps({"link": link}) if as_json else link)
