"""`status`: the whole system at a glance."""

from typing import Any

import typer

from ops.cli.examples import examples
from ops.client.api import connected
from ops.client.health import health_causes, loops_words
from ops.client.screen import AsJson, Columns, print_fields, print_json, print_table, unplaced_words


@examples("tidepool status")
def show_status(context: typer.Context, as_json: AsJson = False) -> None:
    """Show how the fleet is: health, loops, regions, instances, batches, the plan in force."""
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
        why: Columns = {"model": "model", "region": "region", "not placed": unplaced_words}
        print_table("Not placed", why, status["unplaced"])
    plan = status["plan"]
    print_fields(
        [
            ("health", status["health"]["status"]),
            ("because of", health_causes(status["health"]) or None),
            ("last success", loops_words(status["loops"])),
            ("models", status["models"]),
            ("nodes draining", status["nodes_draining"]),
            ("instances", f"{_counts(status['instances'])} ({status['instances_pooled']} of them pooled)"),
            ("batches", _counts(status["batches"])),
            ("queue", f"{status['requests_waiting']} waiting, {status['requests_running']} running"),
            ("plan in force", None if plan is None else f"{plan['id']} ({plan['status']})"),
            ("last planned", _planning_words(status["planning"])),
            ("fleet index", status["fleet_index"]),
        ]
    )


def _planning_words(planning: dict[str, Any] | None) -> str | None:
    if planning is None:
        return None
    words = f"{planning['id']} is {planning['state']}"
    if planning["state"] == "failed":
        return f"{words}, the plan in force stays: {planning['reason']}"
    if planning["state"] == "draft":
        return f"{words} and waits for an operator: {planning['approval_reason']}"
    return words


def _counts(by_state: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(by_state.items())) or "none"
