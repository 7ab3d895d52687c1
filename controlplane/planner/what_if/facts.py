"""The facts of a what-if run, as files that `tidepool simulate --from-live --facts` reads: the fleet and its demand,
with the changes made. The simulation needs no key and no database.
"""

import csv
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from controlplane.errors import InvalidValueError
from controlplane.planner.correct import profiles_in_force
from controlplane.planner.what_if.changes import WhatIfChanges
from controlplane.policies.facts import Endpoint, ModelGpu
from controlplane.settings import Settings
from controlplane.store.demand import IW, NIW, latest_demand_s, read_demand
from controlplane.store.fleet import FleetInventory, all_latencies, read_inventory
from controlplane.store.plans import entries_of, inputs_of, plan_in_force
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from controlplane.store.tables import Desired, Instance, Node, Profile

_HOUR_S = 3600
_LEARN_S_MAX = 7 * 86_400
_TIERS = {IW: "", NIW: "NIW"}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was written. `path`: of the fleet's file, which names that of the demand; `demand_from_s`: the Unix time of
    the demand with which the simulation begins. What comes before is only for forecasts to learn from.
    """

    path: Path
    demand_from_s: int


def write_facts(
    folder: Path, database: Database, live: LiveStore, settings: Settings, changes: WhatIfChanges, *, hours: int
) -> Facts:
    """Write the facts into a folder.

    Raises:
        InvalidValueError: there is more demand than a run may replay.
    """
    with database.one_moment() as session:
        inventory = read_inventory(session, silent_s=settings.heartbeat_stale_s)
        factors = profiles_in_force(session, settings).factors
        fleet = _fleet(session, inventory, changes, factors) | {"settings": _settings(settings)}
        until_s = (latest_demand_s(session) or 0) + 60
    fleet["kv_bytes"] = _kv_bytes(live, inventory)
    minutes = len(inventory.endpoints) * hours * 60
    if minutes > settings.what_if_demand_minutes_max:
        raise InvalidValueError(
            f"hours: {minutes:,} minutes of demand are more than what_if_demand_minutes_max"
            f" ({settings.what_if_demand_minutes_max:,}); replay fewer hours",
            param="hours",
        )
    left_s = (settings.what_if_demand_minutes_max - minutes) // max(1, len(inventory.endpoints)) * 60
    since_s = max(0, until_s - hours * _HOUR_S - min(_LEARN_S_MAX, left_s))
    first_s, last_s = until_s, since_s
    with (folder / "demand.csv").open("w", newline="", encoding="utf-8") as text:
        writer = csv.writer(text, lineterminator="\n")
        for endpoint in inventory.endpoints:
            for row in _demand(database, endpoint.model, endpoint.region, changes, since_s, until_s):
                writer.writerow(row)
                first_s, last_s = min(first_s, row[0]), max(last_s, row[0])
    path = folder / "facts.json"
    path.write_text(json.dumps({"fleet": fleet, "demand": "demand.csv"}), encoding="utf-8")
    whole_hour_s = -(-first_s // _HOUR_S) * _HOUR_S  # with which the simulator's demand begins
    return Facts(path=path, demand_from_s=max(whole_hour_s, last_s + 60 - hours * _HOUR_S))


def _fleet(
    session: Session, inventory: FleetInventory, changes: WhatIfChanges, factors: Mapping[ModelGpu, float]
) -> Row:
    nodes = _with_capacity(_nodes(inventory), changes)
    prices = {row.name: row.cost_per_hour for row in inventory.gpu_types}
    plan = plan_in_force(session)
    pools = None if plan is None else (inputs_of(session, plan.id) or {}).get("pools")
    return {
        "gpu_types": sorted({node["gpu_type"] for node in nodes}),
        "taken_at": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        "regions": [{"name": name, "position": at} for at, name in enumerate(inventory.regions)],
        "latencies": [
            {"origin": origin, "destination": destination, "ms": ms}
            for (origin, destination), ms in all_latencies(session).items()
        ],
        "nodes": nodes,
        "instances": _instances(session, inventory.instances, {node["name"] for node in nodes}, changes),
        "models": [_of(row, "name", "weights_bytes", "kv_bytes_per_token", "context_tokens", "base")
                   for row in inventory.models],
        "profiles": [_profile(row, factors) for row in inventory.profiles],
        "endpoints": [_of(row, "model", "region", "instances_min", "instances_max") for row in inventory.endpoints],
        "prices": prices | {each.gpu_type: each.cost_per_hour for each in changes.prices},
        "pooling": pools if pools is not None and "fill" in pools else None,
        "lost_regions": [
            {"region": lost.region, "after_s": lost.after_h * _HOUR_S, "down_s": lost.down_h * _HOUR_S}
            for lost in changes.lost_regions
        ],
    }  # fmt: skip


def _of(row: Any, *names: str) -> Row:
    return {name: getattr(row, name) for name in names}


def _profile(row: Profile, factors: Mapping[ModelGpu, float]) -> Row:
    factor = factors.get(ModelGpu(model=row.model, gpu_type=row.gpu_type), 1.0)
    stated = _of(row, "model", "gpu_type", "tokens_per_s", "gpus", "load_time_s")
    return stated | {"tokens_per_s": factor * row.tokens_per_s}


def _settings(settings: Settings) -> Row:
    """Those that are numbers or switches, and the strategy: no secret is among them."""
    plain = {name: value for name, value in settings if value is None or isinstance(value, bool | int | float)}
    return plain | {"scale_strategy": settings.scale_strategy}


def _nodes(inventory: FleetInventory) -> list[Row]:
    slots: Mapping[str, list[Row]] = defaultdict(list)
    for slot in inventory.slots:
        slots[slot.node].append(_of(slot, "index", "gpus", "workers", "memory_bytes"))
    return [_node(node, inventory, slots[node.name]) for node in inventory.nodes]


def _node(node: Node, inventory: FleetInventory, slots: list[Row]) -> Row:
    named = _of(node, "name", "region", "gpu_type", "host_bytes", "regroups", "layout_held")
    return named | {"alive": node.name in inventory.alive, "draining": not node.accepting, "slots": slots}


def _with_capacity(nodes: list[Row], changes: WhatIfChanges) -> list[Row]:
    """The nodes after each change, which takes the last ones away or adds copies of them in turn."""
    for change in changes.capacity:
        places: Mapping[tuple[str, str], list[Row]] = defaultdict(list)
        for node in nodes:
            places[node["region"], node["gpu_type"]].append(node)
        nodes = []
        for (region, gpu_type), there in places.items():
            hit = change.region in (None, region) and change.gpu_type in (None, gpu_type)
            nodes += _times(there, change.factor) if hit else there
    return nodes


def _times(nodes: list[Row], factor: float) -> list[Row]:
    taking = [node for node in nodes if node["alive"] and not node["draining"]]
    wanted = math.floor(len(taking) * factor + 0.5)
    added = [taking[at % len(taking)] | {"name": f"+{at} {taking[at % len(taking)]['name']}"}
             for at in range(len(taking), wanted)]  # fmt: skip
    return taking[:wanted] + added


def _instances(session: Session, running: Sequence[Instance], nodes: set[str], changes: WhatIfChanges) -> list[Row]:
    """Instances that run on the nodes that are left, or those that the plan wants."""
    if changes.plan_id is None:
        names = ("model", "region", "gpu_type", "desired", "pooled")
        return [_of(each, *names) for each in running if each.node in nodes]
    return [
        _of(entry, "model", "region", "gpu_type") | {"desired": Desired.RUNNING, "pooled": False}
        for entry in entries_of(session, changes.plan_id)
        for _ in range(entry.after)
    ]


def _kv_bytes(live: LiveStore, inventory: FleetInventory) -> Mapping[str, list[int]]:
    """KV bytes per GPU, as instances report them, by GPU type."""
    gpu_types = {node.name: node.gpu_type for node in inventory.nodes}
    gpus = {(slot.node, slot.index): slot.gpus for slot in inventory.slots}
    reported: dict[str, list[int]] = defaultdict(list)
    for name, node in live.read_view().nodes.items():
        for report in node.heartbeat.instances:
            if report.kv_capacity_bytes and (name, report.slot) in gpus:
                reported[gpu_types[name]].append(report.kv_capacity_bytes // gpus[name, report.slot])
    return reported


def _demand(
    database: Database, model: str, region: str, changes: WhatIfChanges, since_s: int, until_s: int
) -> Iterator[tuple[int, str, str, float, str]]:
    """Minutes of an endpoint's demand, of all kinds, with the changes."""
    factor = math.prod(
        each.factor for each in changes.demand if each.region in (None, region) and each.model in (None, model)
    )
    endpoint = Endpoint(model=model, region=region)
    for kind, tier in _TIERS.items():
        with database.transaction() as session:
            series = read_demand(session, kind=kind, since_s=since_s, until_s=until_s, only=endpoint)
        for start_s, tokens_per_s in series.get(endpoint, []):
            if tokens_per_s is not None:
                yield int(start_s), region, model, tokens_per_s * factor, tier
