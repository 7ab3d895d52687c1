"""Links to pages of the web console."""

import os
import sys
import webbrowser
from typing import Any
from urllib.parse import quote

import typer

from ops.client.api import Api


def console_link(api: Api, *parts: str) -> str:
    """The address of a page of the console that this API serves."""
    return f"{api.url}/ui/#/{'/'.join(quote(part, safe='') for part in parts)}"


def sign_in_link(api: Api) -> str:
    """A link that signs in to the console once, within ten minutes, with the rights of the admin key."""
    made: dict[str, Any] = api.post("/admin/console/links")
    return f"{made['page']}{made['secret']}"


def open_page(link: str) -> None:
    """Print a link, and open it where there is a screen."""
    typer.echo(link)
    if sys.platform in {"darwin", "win32"} or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(link)
