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


@examples("tidepool top", "tidepool top --once", "tidepool top --json      once, for scripts")
def show_top(
    context: typer.Context,
    every_s: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the state once and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch regions, endpoints, queues and objectives until Ctrl-C. Unavailable parts are marked until they return."""
    with connected(context) as api:
        url = api.url
        if as_json:
            print_json(take_snapshot(api, url).as_json())
            return
        console = output()
        if once or not console.is_terminal:
            console.print(screen(take_snapshot(api, url), width=console.width))
            return

        def draw() -> RenderableType:
            return screen(take_snapshot(api, url), width=console.width, height=console.height)

        with Live(draw(), console=console, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(every_s)
                    live.update(draw(), refresh=True)
            except KeyboardInterrupt:
                return
