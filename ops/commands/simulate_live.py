"""`simulate --from-live`: gathers over the API what a scenario needs, and writes it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ops.commands.api import Api, CommandError, connected
from ops.commands.screen import notes, time_text

if TYPE_CHECKING:
    from ops.simulator.live import LiveFleet

HOUR_S = 3600
LEARN_S_MAX = 7 * 86_400
KINDS = {"IW": "", "NIW": "NIW"}
"""The tier of a row of demand by the kind that the API knows; empty: the scenario's shares say."""
_NODES_ASKED = 20
PROFILES = Path(__file__).parents[1] / "profiles"


def write_live_scenario(context: typer.Context, path: Path, *, hours: int, gpu_type: str | None) -> None:
    """Write a scenario of the running fleet, and its demand beside it.

    Raises:
        CommandError: the API refuses, or knows too little; or a file cannot be written.
    """
    from ops.simulator.live import LiveError, cut_demand, live_scenario, write_demand  # noqa: PLC0415 - heavy

    with connected(context) as api:
        fleet = _fleet(api, gpu_type)
        rows = list(_demand(api, fleet.endpoints, hours * HOUR_S + LEARN_S_MAX))
    profile = PROFILES / f"{fleet.gpu_type.lower()}.toml"
    if not profile.exists():
        raise CommandError(f"{fleet.gpu_type} has no profile in {PROFILES}: see `tidepool node profile`")
    demand_path = path.with_suffix(".demand.csv")
    try:
        demand = cut_demand(rows, simulated_s=hours * HOUR_S, learn_s_max=LEARN_S_MAX)
        scenario = live_scenario(fleet, demand, demand_file=demand_path.name, profile=profile.name)
        write_demand(demand_path, demand)
        path.write_text(scenario.text(), encoding="utf-8")
    except LiveError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error.filename}: cannot be written: {error.strerror}") from error
    for note in scenario.notes:
        notes().print(note, markup=False)


def _fleet(api: Api, gpu_type: str | None) -> "LiveFleet":
    from ops.simulator.live import LiveFleet  # noqa: PLC0415

    nodes = api.pages("/admin/nodes")["data"]
    known = sorted({node["gpu_type"] for node in nodes})
    if gpu_type is None and len(known) != 1:
        raise CommandError(f"--gpu-type is needed, one of {', '.join(known)}" if known else "no node ever joined")
    if gpu_type is not None and gpu_type not in known:
        raise CommandError(f"--gpu-type {gpu_type}: nodes have {', '.join(known) or 'none'}")
    chosen = gpu_type or known[0]
    asked = [node["name"] for node in nodes if node["gpu_type"] == chosen][:_NODES_ASKED]
    live = [api.get(f"/admin/nodes/{name}")["live"] or {"instances": []} for name in asked]
    return LiveFleet(
        gpu_type=chosen,
        taken_at=time_text(time.time()),
        regions=api.pages("/admin/regions")["data"],
        latencies=api.pages("/admin/region-latencies")["data"],
        nodes=nodes,
        instances=api.pages("/admin/instances", live_only=True)["data"],
        models=api.pages("/admin/models")["data"],
        profiles=api.pages("/admin/profiles")["data"],
        endpoints=api.pages("/admin/endpoints")["data"],
        kv_bytes=[one["kv_capacity_bytes"] for each in live for one in each["instances"] if one["kv_capacity_bytes"]],
    )


def _demand(api: Api, endpoints: Any, span_s: int) -> Iterator[tuple[int, str, str, float, str]]:
    """Rows of all endpoints and kinds over the last seconds for which anything is known."""
    until_s: int | None = None
    for endpoint in endpoints:
        for kind, tier in KINDS.items():
            where = {"model": endpoint["model"], "region": endpoint["region"]}
            if until_s is None:
                until_s = int(api.get("/admin/demand", kind=kind, **where)["until_s"])
            since_s = max(0, until_s - span_s)
            answer = api.get("/admin/demand", kind=kind, since_s=since_s, until_s=until_s, **where)
            for point in answer["data"]:
                yield point["start_s"], endpoint["region"], endpoint["model"], point["tokens_per_s"], tier
