"""`status`: the whole system at a glance."""

from typing import Any

import typer

from ops.cli.examples import examples
from ops.client.api import connected
from ops.client.health import health_causes, loops_text
from ops.client.screen import AsJson, Columns, print_fields, print_json, print_table, unplaced_text


@examples("tidepool status")
def show_status(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the fleet: health, loops, regions, instances, batches, the plan in force."""
    with connected(context) as api:
        status = api.get("/admin/status")
    if as_json:
        print_json(status)
        return
    columns: Columns = {
        "region": "name",
        "nodes alive": lambda row: f"{row['nodes_alive']} of {row['nodes']}",
        "GPUs": "gpus",
        "instances ready": lambda row: f"{row['instances_ready']} of {row['instances']}",
    }
    print_table("Regions", columns, status["regions"])
    if status["unplaced"]:
        why: Columns = {"model": "model", "region": "region", "not placed": unplaced_text}
        print_table("Not placed", why, status["unplaced"])
    plan = status["plan"]
    print_fields(
        [
            ("health", status["health"]["status"]),
            ("because of", health_causes(status["health"]) or None),
            ("term of the primary", status["health"].get("term")),
            ("last success", loops_text(status["loops"])),
            ("models", status["models"]),
            ("nodes draining", status["nodes_draining"]),
            ("instances", f"{_counts(status['instances'])} ({status['instances_pooled']} of them pooled)"),
            ("batches", _counts(status["batches"])),
            ("batches at risk", status["batches_at_risk"] or None),
            ("queue", f"{status['requests_waiting']} waiting, {status['requests_running']} running"),
            ("plan in force", None if plan is None else f"{plan['id']} ({plan['status']})"),
            ("last planned", _planning_text(status["planning"])),
            ("fleet index", status["fleet_index"]),
        ]
    )


def _planning_text(planning: dict[str, Any] | None) -> str | None:
    if planning is None:
        return None
    text = f"{planning['id']} is {planning['state']}"
    if planning["state"] == "failed":
        return f"{text}, the previous plan stays in force: {planning['reason']}"
    if planning["state"] == "draft":
        return f"{text} and waits for an operator's approval: {planning['approval_reason']}"
    return text


def _counts(by_state: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(by_state.items())) or "none"
