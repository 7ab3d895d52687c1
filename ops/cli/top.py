"""`tidepool top`: the fleet, live in the terminal."""

import time
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live

from ops.cli.examples import examples
from ops.cli.top_screen import screen, take_snapshot
from ops.client.api import connected
from ops.client.screen import AsJson, output, print_json


@examples("tidepool top", "tidepool top --once", "tidepool top --json      one look, for scripts")
def show_top(
    context: typer.Context,
    every_s: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch regions, endpoints, queues and objectives until Ctrl-C. What is away is said, and comes back by itself."""
    with connected(context) as api:
        url = api.url
        if as_json:
            print_json(take_snapshot(api, url).as_json())
            return
        console = output()
        if once or not console.is_terminal:
            console.print(screen(take_snapshot(api, url), width=console.width))
            return

        def look() -> RenderableType:
            return screen(take_snapshot(api, url), width=console.width, height=console.height)

        with Live(look(), console=console, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(every_s)
                    live.update(look(), refresh=True)
            except KeyboardInterrupt:
                return
