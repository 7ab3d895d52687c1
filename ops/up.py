"""`tidepool up`: the local stack in the foreground, with the demo's fleet at the first start."""

import sys
import time
from pathlib import Path

from rich.console import Console

from ops.commands.api import Api, open_api
from ops.demo_fleet import NODES, is_empty, live_instances, register_fleet
from ops.local import LocalNode, LocalStack
from ops.tiny_models import build_tiny_models

_SERVE_WAIT_S = 120.0
_POLL_S = 0.25


def up(home: Path, port: int, *, bare: bool = False) -> None:
    """Start everything, print one `ready` line when requests are served, and stay until SIGTERM or SIGINT.

    A home that has a fleet keeps it; an empty one gets the demo's regions, GPU types, tiny models and endpoints, and
    agents for their nodes. `bare`: no fleet and no agents, for a control plane whose nodes are elsewhere.

    Raises:
        ops.supervisor.SupervisorError: a child cannot be started.
        OSError: the port is taken.
    """
    console = Console(stderr=True)
    home = home.expanduser().resolve()
    nodes: tuple[LocalNode, ...] = () if bare else NODES
    models = [] if bare else build_tiny_models(home / "models")
    stack = LocalStack(home, port, nodes, report=lambda line: console.print(line, highlight=False, style="dim"))
    console.print(f"home {home}; keys in {home / 'keys.json'}; logs in {home / 'logs'}", highlight=False)

    def on_ready() -> None:
        if not bare:
            with open_api(stack.url, stack.keys["admin"]) as api:
                if is_empty(api):
                    register_fleet(api, models)
                _wait_served(api)
        sys.stdout.write(f"ready {stack.url}\n")
        sys.stdout.flush()

    stack.supervisor.run(on_ready)


def _wait_served(api: Api) -> None:
    """Until every model has a ready instance."""
    names = {model["name"] for model in api.pages("/admin/models")["data"]}
    deadline_s = time.monotonic() + _SERVE_WAIT_S
    while time.monotonic() < deadline_s:
        if names <= {row["model"] for row in live_instances(api) if row["observed"] == "ready"}:
            return
        time.sleep(_POLL_S)
    raise TimeoutError(f"not every model has a ready instance after {_SERVE_WAIT_S:g} s; see the logs of the agents")
