"""`region`, `gpu`, `node`, `endpoint`, `instance` and `status`."""

from typing import Annotated, Any

import typer

from ops.client.api import connected
from ops.client.health import health_causes, loops_words
from ops.client.screen import (
    AsJson,
    Columns,
    bytes_text,
    notes,
    print_answer,
    print_fields,
    print_json,
    print_table,
    unplaced_words,
)

regions = typer.Typer(no_args_is_help=True, help="Regions, in the order that traffic prefers them.")
gpus = typer.Typer(no_args_is_help=True, help="GPU types: what one has and costs.")
nodes = typer.Typer(no_args_is_help=True, help="Nodes: machines with GPUs that joined by themselves.")
endpoints = typer.Typer(no_args_is_help=True, help="Endpoints: models offered in regions.")
instances = typer.Typer(no_args_is_help=True, help="Instances: copies of models on slots.")

_NODE = {"node": "name", "region": "region", "GPU": "gpu_type", "alive": "alive", "draining": "draining"}
_INSTANCE = {
    "instance": "id",
    "model": "model",
    "region": "region",
    "node": "node",
    "slot": "slot",
    "pooled": "pooled",
    "engine": "engine",
    "wanted": "desired",
    "state": "state",
    "waits for": "waits_for",
    "error": "error",
}


@regions.command("add")
def add_region(
    context: typer.Context,
    name: str,
    position: Annotated[int | None, typer.Option(min=0, help="Lower is preferred; new ones go last.")] = None,
    as_json: AsJson = False,
) -> None:
    """Register a region, or move it in the order.

    \b
    Example:
      tidepool region add us-east --position 0
    """
    with connected(context) as api:
        answer = api.put(f"/admin/regions/{name}", {} if position is None else {"position": position})
    print_answer(answer, f"region {name} is registered at position {answer['position']}", as_json=as_json)


@regions.command("list")
def list_regions(context: typer.Context, as_json: AsJson = False) -> None:
    """List regions.

    \b
    Example:
      tidepool region list --json
    """
    with connected(context) as api:
        answer = api.pages("/admin/regions")
    rows = sorted(answer["data"], key=lambda row: (row["position"], row["name"]))
    _listed("Regions", {"region": "name", "position": "position"}, answer, rows, as_json=as_json)


@gpus.command("add")
def add_gpu(
    context: typer.Context,
    name: str,
    memory_gib: Annotated[float, typer.Option(min=0.001, help="Memory of one GPU in GiB.")],
    cost_per_hour: Annotated[float, typer.Option(min=0, help="Cost of one GPU for an hour.")],
    as_json: AsJson = False,
) -> None:
    """Register a GPU type, or change what it costs.

    \b
    Example:
      tidepool gpu add H800 --memory-gib 80 --cost-per-hour 2.5
    """
    body = {"memory_bytes": int(memory_gib * 2**30), "cost_per_hour": cost_per_hour}
    with connected(context) as api:
        answer = api.put(f"/admin/gpu-types/{name}", body)
    print_answer(answer, f"GPU type {name} is registered", as_json=as_json)


@gpus.command("list")
def list_gpus(context: typer.Context, as_json: AsJson = False) -> None:
    """List GPU types.

    \b
    Example:
      tidepool gpu list
    """
    with connected(context) as api:
        answer = api.pages("/admin/gpu-types")
    columns: Columns = {
        "GPU": "name",
        "memory": lambda row: bytes_text(row["memory_bytes"]),
        "cost per hour": "cost_per_hour",
    }
    _listed("GPU types", columns, answer, answer["data"], as_json=as_json)


def _slot_text(slot: dict[str, Any]) -> str:
    workers = f" in {slot['workers']} workers" if slot["workers"] > 1 else ""
    return f"{slot['gpus']} GPUs{workers} with {bytes_text(slot['memory_bytes'])}"


@nodes.command("list")
def list_nodes(context: typer.Context, as_json: AsJson = False) -> None:
    """List nodes.

    \b
    Example:
      tidepool node list
    """
    with connected(context) as api:
        answer = api.pages("/admin/nodes")
    columns: Columns = _NODE | {"slots": lambda row: len(row["slots"]), "engine": "engine", "last seen": "last_seen_at"}
    _listed("Nodes", columns, answer, answer["data"], as_json=as_json)


@nodes.command("show")
def show_node(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Show a node, what it shall hold, and what it says of that.

    \b
    Example:
      tidepool node show us-east-1
    """
    with connected(context) as api:
        node = api.get(f"/admin/nodes/{name}")
    if as_json:
        print_json(node)
        return
    slots = ", ".join(_slot_text(slot) for slot in node["slots"])
    known = [(header, node[field]) for header, field in _NODE.items()]
    host = None if node["host_bytes"] is None else bytes_text(node["host_bytes"])
    print_fields(
        [*known, ("slots", slots), ("host memory", host), ("address", node["url"]), ("last seen", node["last_seen_at"])]
    )
    if node["live_error"] is not None:
        notes().print(f"no heartbeat can be shown: {node['live_error']}", markup=False)
    said = {live["instance_id"]: live for live in (node["live"] or {"instances": []})["instances"]}
    columns: dict[str, Any] = {name: field for name, field in _INSTANCE.items() if field not in {"region", "node"}}
    columns["running"] = lambda row: said.get(row["id"], {}).get("running")
    columns["waiting"] = lambda row: said.get(row["id"], {}).get("waiting")
    print_table("Instances", columns, node["instances"])


@nodes.command("drain")
def drain_node(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Take a node out of service: nothing new is placed there.

    \b
    Example:
      tidepool node drain us-east-1
    """
    with connected(context) as api:
        answer = api.post(f"/admin/nodes/{name}/drain")
    print_answer(answer, f"node {name} is draining", as_json=as_json)


@nodes.command("undrain")
def undrain_node(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Put a node back into service.

    \b
    Example:
      tidepool node undrain us-east-1
    """
    with connected(context) as api:
        answer = api.post(f"/admin/nodes/{name}/undrain")
    print_answer(answer, f"node {name} is in service", as_json=as_json)


@endpoints.command("set")
def set_endpoint(
    context: typer.Context,
    model: str,
    region: str,
    minimum: Annotated[int, typer.Option("--min", min=0, help="Instances kept at least.")] = 0,
    maximum: Annotated[int, typer.Option("--max", min=0, help="Instances at most.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Offer a model in a region, with limits on its instances.

    \b
    Example:
      tidepool endpoint set llama-8b us-east --min 1 --max 8
    """
    body = {"model": model, "region": region, "instances_min": minimum, "instances_max": maximum}
    with connected(context) as api:
        answer = api.put("/admin/endpoints", body)
    print_answer(answer, f"{model} in {region} may have {minimum} to {maximum} instances", as_json=as_json)


@endpoints.command("list")
def list_endpoints(context: typer.Context, as_json: AsJson = False) -> None:
    """List endpoints.

    \b
    Example:
      tidepool endpoint list
    """
    with connected(context) as api:
        answer = api.pages("/admin/endpoints")
    columns: Columns = {
        "model": "model",
        "region": "region",
        "min": "instances_min",
        "max": "instances_max",
        "not placed": lambda row: "\n".join(unplaced_words(each) for each in row["unplaced"] or ()) or None,
    }
    _listed("Endpoints", columns, answer, answer["data"], as_json=as_json)


@instances.command("list")
def list_instances(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Stopped ones too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List instances.

    \b
    Example:
      tidepool instance list --all
    """
    with connected(context) as api:
        answer = api.pages("/admin/instances", live_only=not everything)
    _listed("Instances", _INSTANCE, answer, answer["data"], as_json=as_json)


def show_status(context: typer.Context, as_json: AsJson = False) -> None:
    """Show how the fleet is: health, loops, regions, instances, batches, the plan in force.

    \b
    Example:
      tidepool status
    """
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


def _listed(title: str, columns: Columns, answer: Any, rows: list[Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        print_table(title, columns, rows)
