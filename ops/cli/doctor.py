"""`doctor`: examines an installation, and says what to do."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.processes import running
from ops.client.api import CommandError, Target
from ops.client.screen import AsJson, Columns, print_json, print_table, progress_bar, same

if TYPE_CHECKING:
    from ops.doctor.examine import Examination


@examples(
    "tidepool doctor", "tidepool doctor --json | jq '.findings[] | select(.level != \"ok\")'", "tidepool doctor --node"
)
def doctor(
    context: typer.Context,
    home: Annotated[Path, typer.Option(envvar="TIDEPOOL_HOME", help="The home folder.", file_okay=False)] = Path(
        "~/.tidepool"
    ),
    node: Annotated[
        bool, typer.Option("--node", help="Examine this machine as a GPU node, which knows no database.")
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, max=600, help="Seconds that it may take.")] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Examine an installation: versions, clocks, ports, GPUs, space, keys, replication, loops, nodes, files.

    \b
    Run it where a process of the control plane runs, with its settings (TIDEPOOL_*). Changes nothing, but writes a
    small file to the file store and deletes it. Exit status 1: something fails. Warnings do not count.
    """
    from ops.doctor.examine import examine

    with running():
        examinations = _examinations(context.obj, home.expanduser(), node=node)
    with progress_bar("examining") as report:
        findings = examine(
            examinations, timeout_s=timeout_s, report=lambda name, done, of: report(f"examined {name}", done, of)
        )
    rows: list[dict[str, Any]] = [asdict(finding) for finding in findings]
    counts = Counter(str(row["level"]) for row in rows)
    if as_json:
        print_json({"findings": rows, "counts": counts})
    else:
        columns: Columns = {**same("check", "level", "found"), "what to do": "todo"}
        print_table("Findings", columns, rows)
    if failures := counts["failure"]:
        raise CommandError(f"{failures} of {len(rows)} checks failed; each says what to do")


def _examinations(target: Target, home: Path, *, node: bool) -> Mapping[str, "Examination"]:
    from ops.client.credentials import api_url
    from ops.client.home import is_of_up
    from ops.doctor.installation import control_examinations, examine_port, machine_examinations, stopped_stack

    found = dict(machine_examinations(home, is_node=node))
    if node:
        url = _control_url()
        return found | {"gateway": lambda: [examine_port(url, "gateway", "TIDEPOOL_AGENT_CONTROL_URL")]}
    from ops.local.addresses import installed_settings
    from ops.local.stack import is_running

    elsewhere = target.url or os.environ.get("TIDEPOOL_URL") or os.environ.get("TIDEPOOL_DATABASE_URL")
    if not elsewhere and is_of_up(home) and not is_running(home):
        return found | dict(stopped_stack(home))
    return found | dict(control_examinations(installed_settings(home), api_url(target.url, os.environ)))


def _control_url() -> str:
    """Where this node's agent sends heartbeats; its other settings need not be here."""
    from dataplane.agent.settings import AgentSettings

    return os.environ.get("TIDEPOOL_AGENT_CONTROL_URL") or str(AgentSettings.model_fields["control_url"].default)
