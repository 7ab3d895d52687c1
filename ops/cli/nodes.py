"""`node`: machines with GPUs, as the control plane knows them, and what this one can do."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ops.cli.deletes import delete_node
from ops.cli.examples import examples
from ops.cli.fleet import INSTANCE_COLUMNS
from ops.cli.listing import print_pages
from ops.cli.node_bench import bench_node
from ops.cli.node_check import check_node
from ops.cli.node_follow import follow_node
from ops.cli.node_memory import plan_node_memory
from ops.cli.node_profile import profile_node
from ops.client.api import connected, path_to
from ops.client.screen import (
    AsJson,
    Columns,
    bytes_text,
    notes,
    print_answer,
    print_fields,
    print_json,
    print_table,
)

nodes = typer.Typer(no_args_is_help=True, help="Nodes: machines with GPUs that have joined the fleet.")

Layout = Annotated[str | None, typer.Argument(help="GPUs of each slot, in their order, as 4,1,1,2.")]
ByPlans = Annotated[bool, typer.Option("--by-plans", help="Leave them to plans again.")]


def _state_text(node: Mapping[str, Any]) -> str:
    """The node's state; of a gateway of the release before, which has no word for it, what its flags say."""
    if "state" in node:
        return str(node["state"])
    if not node["alive"]:
        return "silent"
    return next((flag for flag in ("leaving", "draining") if node.get(flag)), "alive")


_NODE: Columns = {"node": "name", "region": "region", "GPU": "gpu_type", "state": _state_text}


def _version_text(node: Mapping[str, Any]) -> str | None:
    version: str | None = node["version"]
    return f"{version} (not the gateway's)" if node["version_differs"] else version


def _engine_text(node: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (node["engine"], node["engine_version"])))


def _slot_text(slot: dict[str, Any]) -> str:
    workers = f" in {slot['workers']} workers" if slot["workers"] > 1 else ""
    hosts = f" of {slot['hosts']} hosts" if (slot.get("hosts") or 1) > 1 else ""
    return f"{slot['gpus']} GPUs{workers}{hosts} with {bytes_text(slot['memory_bytes'])}"


def _hosts_text(node: Mapping[str, Any]) -> str | None:
    """How many hosts the GPUs of its slots are of, the node included, and which of these are not connected."""
    more = sum((slot.get("hosts") or 1) - 1 for slot in node["slots"])
    if not more:
        return None
    others = node.get("other_hosts")
    if others is None:
        return f"{1 + more}, not known which are there"
    absent = ", ".join(f"{each['host']} of slot {each['slot']}" for each in others if not each["connected"])
    return f"{1 + more}, without {absent}" if absent else f"{1 + more}"


_OTHER_HOSTS: Columns = {
    "slot": "slot",
    "host": "host",
    "name": "hostname",
    "connected": lambda row: "yes" if row["connected"] else "no",
    "silent s": "silent_s",
    "refused": "refusal",
}


def _layout_text(node: Mapping[str, Any]) -> str:
    sizes = ", ".join(str(size) for size in node["layout"])
    return f"{sizes} GPUs, since {node['layout_at']}"


def _chosen_text(node: Mapping[str, Any]) -> str:
    """Who says how its GPUs are grouped."""
    since = f", chosen {at}" if (at := node.get("layout_chosen_at")) else ""
    return f"held by an operator{since}" if node.get("layout_held") else f"left to plans{since}"


@nodes.command("list")
@examples("tidepool node list")
def list_nodes(context: typer.Context, as_json: AsJson = False) -> None:
    """List nodes."""
    columns: Columns = {
        **_NODE,
        "slots": lambda row: len(row["slots"]),
        "hosts": _hosts_text,
        "engine": _engine_text,
        "version": _version_text,
        "last seen": "last_seen_at",
    }
    print_pages(context, "/admin/nodes", "Nodes", columns, as_json=as_json)


@nodes.command("show")
@examples("tidepool node show us-east-1")
def show_node(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Show a node, its desired instances, and their state as the node reports it."""
    with connected(context) as api:
        node = api.get(path_to("/admin/nodes", name))
    if as_json:
        print_json(node)
        return
    slots = ", ".join(_slot_text(slot) for slot in node["slots"])
    known = [(header, field(node) if callable(field) else node[field]) for header, field in _NODE.items()]
    host = None if node["host_bytes"] is None else bytes_text(node["host_bytes"])
    print_fields(
        [
            *known,
            ("slots", slots),
            *([] if node["layout"] is None else [("slots wanted", _layout_text(node))]),
            *([("layout", _chosen_text(node))] if node["regroups"] else []),
            ("host memory", host),
            ("engine", _engine_text(node)),
            ("version", _version_text(node)),
            ("address", node["url"]),
            ("last seen", node["last_seen_at"]),
        ]
    )
    if node["live_error"] is not None:
        notes().print(f"no heartbeat is available: {node['live_error']}", markup=False)
    if others := (node["live"] or {}).get("other_hosts"):
        print_table("Other hosts of its slots", _OTHER_HOSTS, others)
    reported = {live["instance_id"]: live for live in (node["live"] or {"instances": []})["instances"]}
    columns: dict[str, Any] = {
        name: field for name, field in INSTANCE_COLUMNS.items() if field not in {"region", "node"}
    }
    columns["running"] = lambda row: reported.get(row["id"], {}).get("running")
    columns["waiting"] = lambda row: reported.get(row["id"], {}).get("waiting")
    print_table("Instances", columns, node["instances"])


@nodes.command("drain")
@examples("tidepool node drain us-east-1")
def drain_node(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Take a node out of service: nothing new is placed there."""
    with connected(context) as api:
        answer = api.post(path_to("/admin/nodes", name, "drain"))
    print_answer(answer, f"node {name} is draining", as_json=as_json)


@nodes.command("undrain")
@examples("tidepool node undrain us-east-1")
def undrain_node(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Put a node back into service."""
    with connected(context) as api:
        answer = api.post(path_to("/admin/nodes", name, "undrain"))
    print_answer(answer, f"node {name} is in service", as_json=as_json)


@nodes.command("layout")
@examples("tidepool node layout us-east-1 4,1,1,2", "tidepool node layout us-east-1 --by-plans")
def set_layout(
    context: typer.Context, name: str, layout: Layout = None, by_plans: ByPlans = False, as_json: AsJson = False
) -> None:
    """Group a node's GPUs into slots of so many each. Slots that change are drained first; the others stay.

    \b
    Plans leave a node that was grouped like that, until --by-plans hands it back to them.
    """
    if (layout is None) != by_plans:
        raise typer.BadParameter("either LAYOUT or --by-plans is needed", param_hint="LAYOUT")
    with connected(context) as api:
        if layout is None:
            node = api.delete(path_to("/admin/nodes", name, "layout"))
            said = "keeps its slots until a plan chooses others"
        else:
            node = api.put(path_to("/admin/nodes", name, "layout"), {"layout": _sizes(layout)})
            said = "has these slots" if node["layout"] is None else "is regrouped as its slots get empty"
    print_answer(node, f"node {name} {said}", as_json=as_json)
    for warning in node.get("warnings", ()):
        notes().print(f"warning: {warning}", markup=False)


def _sizes(layout: str) -> list[int]:
    try:
        return [int(size) for size in layout.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{layout!r} is no list of numbers as 4,1,1,2", param_hint="LAYOUT") from error


nodes.command("delete")(delete_node)
nodes.command("follow")(follow_node)
nodes.command("check")(check_node)
nodes.command("bench")(bench_node)
nodes.command("profile")(profile_node)
nodes.command("plan-memory")(plan_node_memory)
