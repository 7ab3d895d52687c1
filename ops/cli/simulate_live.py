"""`simulate --from-live`: a scenario from the state of the running fleet."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dataplane.scheduling.profile import load_gpu_profile
from ops.client.api import Api, CommandError, connected, path_to
from ops.client.screen import notes, time_text

if TYPE_CHECKING:
    from ops.simulator.scenario.live import LiveFleet

HOUR_S = 3600
LEARN_S_MAX = 7 * 86_400
KINDS = {"IW": "", "NIW": "NIW"}
"""The tier of a row of demand by its kind in the API; empty: split by the scenario's shares."""
_NODES_ASKED = 20
_PLANS_ASKED = 20
PROFILES = Path(__file__).parents[1] / "profiles"


def write_live_scenario(
    context: typer.Context, path: Path, *, hours: int, gpu_types: Sequence[str], facts: Path | None = None
) -> None:
    """Write a scenario of the running fleet, and its demand next to it. `gpu_types`: only these; empty: all. `facts`:
    what a worker wrote of the fleet, instead of asking the API.

    Raises:
        CommandError: the API refuses, or lacks data; or a file cannot be read or written.
    """
    from ops.simulator.scenario.live import LiveError, cut_demand, live_scenario, write_demand

    if facts is None:
        with connected(context) as api:
            fleet = _fleet(api, gpu_types)
            rows = list(_demand(api, fleet.endpoints, hours * HOUR_S + LEARN_S_MAX))
    else:
        fleet, rows = _read_facts(facts)
    demand_path = path.with_suffix(".demand.csv")
    try:
        demand = cut_demand(rows, simulated_s=hours * HOUR_S, learn_s_max=LEARN_S_MAX)
        profiles = {name: profiles_by_type()[name] for name in fleet.gpu_types}
        scenario = live_scenario(fleet, demand, demand_file=demand_path.name, profiles=profiles)
        write_demand(demand_path, demand)
        path.write_text(scenario.text(), encoding="utf-8")
    except LiveError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error.filename}: cannot be written: {error.strerror}") from error
    for note in scenario.notes:
        notes().print(note, markup=False)


def _read_facts(path: Path) -> "tuple[LiveFleet, list[tuple[int, str, str, float, str]]]":
    """The fleet and its demand; GPU types without a profile of ours are left out."""
    from ops.simulator.scenario.live import LiveFleet, read_demand

    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        known = [name for name in facts["fleet"]["gpu_types"] if name in profiles_by_type()]
        fleet = LiveFleet(**facts["fleet"] | {"gpu_types": known})
        rows = read_demand(path.with_name(facts["demand"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path}: cannot be read: {error}") from error
    if not known:
        raise CommandError("no node of a GPU type with a profile is left: see `tidepool node profile`")
    return fleet, rows


@cache
def profiles_by_type() -> dict[str, str]:
    """The files of the profiles that Tidepool ships, by GPU type."""
    return {load_gpu_profile(path).gpu_type: path.name for path in sorted(PROFILES.glob("*.toml"))}


def _fleet(api: Api, gpu_types: Sequence[str]) -> "LiveFleet":
    from ops.simulator.scenario.live import LiveFleet

    nodes = api.pages("/admin/nodes")["data"]
    known = sorted({node["gpu_type"] for node in nodes})
    if not known:
        raise CommandError("no node ever joined")
    chosen = sorted({*gpu_types}) or known
    for name in chosen:
        if name not in known:
            raise CommandError(f"--gpu-type {name}: nodes have {', '.join(known)}")
        if name not in profiles_by_type():
            others = "; or name the others with --gpu-type" if len(chosen) > 1 else ""
            raise CommandError(f"{name} has no profile in {PROFILES}: see `tidepool node profile`{others}")
    return LiveFleet(
        gpu_types=chosen,
        taken_at=time_text(time.time()),
        regions=api.pages("/admin/regions")["data"],
        latencies=api.pages("/admin/region-latencies")["data"],
        nodes=nodes,
        instances=api.pages("/admin/instances", live_only=True)["data"],
        models=api.pages("/admin/models")["data"],
        profiles=_profiles(api),
        endpoints=api.pages("/admin/endpoints")["data"],
        prices={row["name"]: row["cost_per_hour"] for row in api.pages("/admin/gpu-types")["data"]},
        kv_bytes={name: _kv_bytes(api, [node for node in nodes if node["gpu_type"] == name]) for name in chosen},
        pooling=_pooling(api),
        settings=_settings(api),
    )


def _settings(api: Api) -> dict[str, Any]:
    """The settings in force by their names; none where the key may not read them, as a viewer's may not."""
    try:
        rows = api.get("/admin/settings")["data"]
    except CommandError as error:
        if error.status == HTTPStatus.FORBIDDEN:
            return {}
        raise
    return {row["name"].removeprefix("TIDEPOOL_").lower(): row["value"] for row in rows}


def _profiles(api: Api) -> list[dict[str, Any]]:
    """The profiles as plans count them: corrected by what instances do."""
    corrections = api.pages("/admin/profile-corrections")["data"]
    rates = {(row["model"], row["gpu_type"]): row["tokens_per_s"] for row in corrections}
    return [
        row | {"tokens_per_s": rates.get((row["model"], row["gpu_type"]), row["tokens_per_s"])}
        for row in api.pages("/admin/profiles")["data"]
    ]


def _pooling(api: Api) -> Mapping[str, Any] | None:
    """The pooling settings of the newest applied plan that a solver made."""
    for plan in api.get("/admin/plans", limit=_PLANS_ASKED)["data"]:
        if plan["applied_at"] is not None and plan["status"] != "restored":
            pooling: Mapping[str, Any] | None = api.get(path_to("/admin/plans", plan["id"], "inputs"))["pools"]
            return pooling if pooling is not None and "fill" in pooling else None
    return None


def _kv_bytes(api: Api, nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """KV bytes per GPU, as instances on some of the nodes report them."""
    reported = []
    for node in nodes[:_NODES_ASKED]:
        gpus = {slot["index"]: slot["gpus"] for slot in node["slots"]}
        live = api.get(path_to("/admin/nodes", node["name"]))["live"] or {"instances": []}
        reported += [one["kv_capacity_bytes"] // gpus[one["slot"]] for one in live["instances"] if one["slot"] in gpus]
    return [kv_bytes for kv_bytes in reported if kv_bytes]


def _demand(api: Api, endpoints: Any, span_s: int) -> Iterator[tuple[int, str, str, float, str]]:
    """Rows of all endpoints and kinds over the last `span_s` of known demand."""
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
