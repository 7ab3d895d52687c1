"""`tidepool up`: the local stack in the foreground, with the demo's fleet at the first start."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from rich.console import Console

from dataplane.runtime.logs import LogSettings
from ops.client.api import Api, open_api
from ops.client.console import sign_in_link
from ops.client.home import EmbeddedError, forget_api_url, make_home, write_api_url
from ops.local.addresses import given_settings
from ops.local.ports import try_port
from ops.local.pretrained import pretrained_model
from ops.local.regional_stack import RegionalStack
from ops.local.sample_fleet import is_empty, make_nodes, register_fleet
from ops.local.stack import LocalNode, LocalStack, another_runs_on, is_running
from ops.local.tiny_models import TinyModel, build_tiny_models

log = structlog.get_logger()


def up(home: Path, port: int, *, bare: bool = False, tiny: bool = False, regional: bool = False) -> None:
    """Start everything, print one `ready` line when requests are served, and stay until SIGTERM or SIGINT.

    A home that has a fleet keeps it; an empty one gets the demo's regions, GPU types, models and endpoints, and
    agents for their nodes. `bare`: no fleet and no agents, for a control plane whose nodes are elsewhere. `tiny`:
    without the pretrained model, which is downloaded once. `regional`: each region has servers and a control plane of
    its own.

    Raises:
        ops.local.supervisor.SupervisorError: a child cannot be started.
        ops.client.home.EmbeddedError: the home cannot be used, or TLS is asked for, or a server is out of reach.
        OSError: the port is taken.
        pydantic.ValidationError, pydantic_settings.SettingsError: a setting is invalid.
    """
    screen = _Screen(as_json=LogSettings().format == "json")
    if tls := [name for name in ("TIDEPOOL_TLS_CERT_FILE", "TIDEPOOL_AGENT_TLS_CERT_FILE") if os.environ.get(name)]:
        raise EmbeddedError(f"`tidepool up` serves http on the loopback interface: unset {tls[0]}")
    home = home.expanduser().resolve()
    _check_before_start(home, port)
    models = [] if bare else _make_models(home)
    pretrained = None if bare or tiny else pretrained_model(screen.print)
    nodes: tuple[LocalNode, ...] = () if bare else make_nodes(models, pretrained)
    kind = RegionalStack if regional else LocalStack
    stack = kind(home, port, nodes, report=lambda line: screen.print(line, style="dim"))
    logs = home / "regions" / "*" / "logs" if regional else home / "logs"
    screen.print(f"home {home}; keys in {home / 'keys.json'}; logs in {logs}")

    def on_ready() -> None:
        if not bare:
            with open_api(stack.url, stack.keys["admin"]) as api:
                if is_empty(api):
                    register_fleet(api, [*models, *([] if pretrained is None else [pretrained])])
                if late := wait_served(api, screen.print):
                    message = f"not served yet: {', '.join(late)}; see the logs of the agents"
                    screen.print(message, style="yellow")
        screen.print_console(stack)
        for region, url in stack.urls().items() if isinstance(stack, RegionalStack) else ():
            screen.print(f"region {region}: {url}")
        sys.stdout.write(f"ready {stack.url}\n")
        sys.stdout.flush()

    write_api_url(home, stack.url)
    try:
        stack.run(on_ready)
    finally:
        forget_api_url(home)


def _check_before_start(home: Path, port: int) -> None:
    """Refuse what the children would refuse only minutes later, and without naming the setting."""
    given_settings(home)
    make_home(home)
    if is_running(home):  # who starts a second stack on a home shall hear of the home, and not of the port
        raise another_runs_on(home)
    try:
        try_port(port)
    except OSError as error:
        raise OSError(
            f"port {port} cannot be used ({error.strerror}): end what listens there, or choose another port with --port"
            " or TIDEPOOL_PORT"
        ) from error


def _make_models(home: Path) -> list[TinyModel]:
    try:
        return build_tiny_models(home / "models")
    except OSError as error:
        raise EmbeddedError(f"the demo's models cannot be written to {home} (TIDEPOOL_HOME): {error}") from error


class _Screen:
    """Messages for the user who started the stack: on the terminal, or in the log where that is JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._console = None if as_json else Console(stderr=True)

    def print_console(self, stack: LocalStack | RegionalStack) -> None:
        """The console's address. A link that signs in is for the terminal alone, never for the log."""
        if self._console is None:
            log.info("the console", url=f"{stack.url}/ui/")
            return
        with open_api(stack.url, stack.keys["admin"]) as api:
            self._console.print(
                f"console {sign_in_link(api)}\n(signs in once, within ten minutes; `tidepool console` prints another)",
                highlight=False,
                soft_wrap=True,
            )

    def print(self, line: str, style: str | None = None) -> None:
        if self._console is None:
            log.info(line)
        else:
            self._console.print(line, highlight=False, style=style)


def _unserved(api: Api) -> list[str]:
    """Models with a minimum of instances and none to which the gateway would route, by its own view of the fleet: a
    test request would count as demand.
    """
    wanted = {row["model"] for row in api.pages("/admin/endpoints")["data"] if row["instances_min"] > 0}
    usable = {row["model"] for row in api.get("/admin/status/live")["endpoints"] if row["utilization"] is not None}
    return sorted(wanted - usable)


def _reasons(api: Api, models: list[str]) -> str:
    """Why instances of these models are not ready."""
    rows = api.pages("/admin/instances", live_only=True)["data"]
    late = [row for row in rows if row["model"] in models and row["state"] != "ready"]
    return ", ".join(
        sorted({row["error"] or row["waits_for"] or "its node has not sent a heartbeat yet" for row in late})
    ) or ("no instance is placed yet")


def wait_served(
    api: Api, report: Callable[[str], None], *, patience_s: float = 120.0, poll_s: float = 0.5
) -> list[str]:
    """Wait until every model with a minimum of instances can be served, or `patience_s` are over. Reports the reasons,
    and returns the models that are left.
    """
    deadline_s, reported = time.monotonic() + patience_s, ""
    while unserved := _unserved(api):
        if time.monotonic() > deadline_s:
            return unserved
        message = f"{len(unserved)} models are not served yet: {_reasons(api, unserved)}"
        if message != reported:
            report(message)
            reported = message
        time.sleep(poll_s)
    return []
