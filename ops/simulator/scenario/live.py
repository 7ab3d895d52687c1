"""A scenario from a running Tidepool: its fleet, and its past demand as the traffic.

The demand of the last hours is the traffic; forecasts learn from the demand before. The admin API does not report
everything that a simulation needs: `notes` lists the assumptions, and the file can be edited.
"""

import csv
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit

from controlplane.policies.placement.facts import StartTimes
from ops.simulator.scenario.live_settings import add_settings
from ops.simulator.scenario.live_slots import Place, Slots, lacks_layout, placed, slots_of_node

DAY_S = 86_400
HOUR_S = 3600
COLUMNS = ("start_s", "region", "model", "tokens_per_s", "tier")
Row = Mapping[str, Any]


class LiveError(ValueError):
    """A fleet of which no scenario can be made; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class LiveFleet:
    """Answers of the admin API. `gpu_types`: those wanted. `prices`: of a GPU hour, `kv_bytes`: reported by instances,
    both by GPU type. `pooling`: settings of pools in the plan in force; None: it has none. `lost_regions`: regions that
    fail after `after_s` seconds of the traffic, for `down_s`. `settings`: of the service, by name; empty: not known.
    """

    gpu_types: Sequence[str]
    taken_at: str
    regions: Sequence[Row]
    latencies: Sequence[Row]
    nodes: Sequence[Row]
    instances: Sequence[Row]
    models: Sequence[Row]
    profiles: Sequence[Row]
    endpoints: Sequence[Row]
    prices: Mapping[str, float]
    kv_bytes: Mapping[str, Sequence[int]]
    pooling: Row | None = None
    lost_regions: Sequence[Row] = ()
    settings: Row = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What of a fleet can be simulated. `rates`: profiles by model and GPU type. `pooling`: None: no pools."""

    gpu_types: Sequence[str]
    models: Sequence[Row]
    rates: Mapping[tuple[str, str], Row]
    pooling: Row | None

    @property
    def several(self) -> bool:
        return len(self.gpu_types) > 1


@dataclass(frozen=True, kw_only=True)
class LiveDemand:
    """Minutes of demand as rows of `COLUMNS`, ordered by time: the first `learn_s` seconds are for forecasts only."""

    rows: Sequence[tuple[int, str, str, float, str]]
    learn_s: int
    simulated_s: int


@dataclass(frozen=True, kw_only=True)
class LiveScenario:
    """A scenario's document, and what a reader should know of it."""

    document: dict[str, Any]
    notes: Sequence[str]

    def text(self) -> str:
        """The scenario as TOML, after the notes."""
        return "".join(f"# {note}\n" for note in self.notes) + "\n" + tomlkit.dumps(self.document)


def cut_demand(rows: Iterable[tuple[int, str, str, float, str]], *, simulated_s: int, learn_s_max: int) -> LiveDemand:
    """The last `simulated_s` seconds, and up to `learn_s_max` before them. It begins at a whole hour.

    Raises:
        LiveError: there is not an hour of it.
    """
    ordered = sorted(rows)
    if not ordered:
        raise LiveError("no demand is known: no request arrived, or none was imported")
    until_s = ordered[-1][0] + 60
    since_s = max(-(-ordered[0][0] // HOUR_S) * HOUR_S, until_s - simulated_s - learn_s_max)
    if until_s - since_s < HOUR_S:
        raise LiveError(f"{(until_s - ordered[0][0]) // 60} minutes of demand are known; a whole hour is needed")
    learn_s = max(0, (until_s - since_s - simulated_s) // 60 * 60)
    kept = [row for row in ordered if row[0] >= since_s]
    return LiveDemand(rows=kept, learn_s=learn_s, simulated_s=until_s - since_s - learn_s)


def live_scenario(
    fleet: LiveFleet, demand: LiveDemand, *, demand_file: str, profiles: Mapping[str, str]
) -> LiveScenario:
    """The scenario. `demand_file`: its demand, in the same folder; `profiles`: by GPU type.

    Raises:
        LiveError: the fleet serves nothing that could be simulated.
    """
    kept = _kept(fleet, demand)
    running = [row for row in fleet.instances if row["desired"] == "running"]
    wanted = _wanted(kept, running)
    there = _there(fleet, kept, wanted)
    document: dict[str, Any] = {
        "name": f"the live fleet of {fleet.taken_at}",
        "seed": 1,
        "regions": [row["name"] for row in sorted(fleet.regions, key=lambda row: (row["position"], row["name"]))],
        "latencies_ms": {f"{row['origin']} > {row['destination']}": row["ms"] / 2 for row in fleet.latencies},
        "traffic": {
            "kind": "csv",
            "path": demand_file,
            "scale": 1.0,
            "until_s": demand.learn_s + demand.simulated_s,
            "tiers": {"IW-F": 0.5, "IW-N": 0.5},
            "prompt_tokens": {"mean": 1000, "spread": 1.0, "most": 16_384},
            "output_tokens": {"mean": 200, "spread": 0.8, "most": 4096},
        },
        "fleet": _fleet(fleet, kept, there, profiles),
        "policy": {"rerouting": True},
        "scaling": {"strategy": "lt-i", **_limits(fleet, kept)},
        "planning": {"learn_s": demand.learn_s, **_pooling(kept)},
        "provisioning": _provisioning(fleet, kept),
        "models": [_model(row, kept) for row in kept.models],
        "failures": [
            {"region": lost["region"], "at_s": demand.learn_s + lost["after_s"], "down_s": lost["down_s"]}
            for lost in fleet.lost_regions
        ],
    }
    _add_settings(document, fleet)
    notes = (*_notes(fleet, demand, kept), *_notes_of_slots(fleet, kept, running, wanted - there))
    return LiveScenario(document=document, notes=notes)


def read_demand(path: Path) -> list[tuple[int, str, str, float, str]]:
    """Rows of `COLUMNS` without their names. Raises OSError."""
    with path.open(newline="", encoding="utf-8") as text:
        return [
            (int(start_s), region, model, float(rate), tier) for start_s, region, model, rate, tier in csv.reader(text)
        ]


def write_demand(path: Path, demand: LiveDemand) -> None:
    """Write its rows as a CSV. Raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(demand.rows)


def _kept(fleet: LiveFleet, demand: LiveDemand) -> _Kept:
    """Models with demand, and the bases of adapters with demand, on GPU types where they have a profile and a node is
    alive. Adapters whose bases have none are left out; whole models are those that take other GPUs than their bases.
    """
    alive = {node["gpu_type"] for node in _alive(fleet)}
    asked = {row[2] for row in demand.rows}
    names = {row["name"] for row in fleet.models} & asked
    names |= {row["base"] for row in fleet.models if row["name"] in names and row.get("base")}
    rates = {
        (row["model"], row["gpu_type"]): row
        for row in fleet.profiles
        if row["model"] in names and row["gpu_type"] in fleet.gpu_types
    }
    if not rates:
        raise LiveError(f"no model with demand has a profile on {' or '.join(fleet.gpu_types)}")
    profiled = {gpu_type for _, gpu_type in rates}
    gpu_types = [gpu_type for gpu_type in fleet.gpu_types if gpu_type in profiled & alive]
    if not gpu_types:
        raise LiveError(f"no node of {' or '.join(sorted(profiled))} is alive")
    rates = {key: row for key, row in rates.items() if key[1] in gpu_types}
    known = {model for model, _ in rates}
    models = [row for row in fleet.models if row["name"] in known and (row.get("base") or row["name"]) in known]
    rates = {key: row for key, row in rates.items() if key[0] in {model["name"] for model in models}}
    if not rates:
        raise LiveError(f"no base of an adapter with demand has a profile on {' or '.join(gpu_types)}")
    wanted = fleet.pooling is not None and (fleet.pooling["enabled"] or fleet.pooling.get("reserve") is not None)
    reported = all(node["host_bytes"] for node in _alive(fleet) if node["gpu_type"] in gpu_types)
    bases = {model["name"]: model for model in models}
    models = [_whole(model, bases[model["base"]]) if _differs(model, rates) else model for model in models]
    return _Kept(
        gpu_types=gpu_types, models=models, rates=rates, pooling=fleet.pooling if wanted and reported else None
    )


def _differs(model: Row, rates: Mapping[tuple[str, str], Row]) -> bool:
    """Whether it is an adapter whose instances take other GPUs than those of its base on some type."""
    mine = {gpu_type: row["gpus"] for (name, gpu_type), row in rates.items() if name == model["name"]}
    its = {gpu_type: row["gpus"] for (name, gpu_type), row in rates.items() if name == model.get("base")}
    return any(mine[gpu_type] != its[gpu_type] for gpu_type in mine.keys() & its.keys())


def _whole(adapter: Row, base: Row) -> Row:
    return {**adapter, "base": None, "weights_bytes": adapter["weights_bytes"] + base["weights_bytes"]}


def _add_settings(document: dict[str, Any], fleet: LiveFleet) -> None:
    """Set what the service is set to. A file cannot say that spot instances have no greatest age: it is then the whole
    time. Plans regroup only where a node lets them.
    """
    add_settings(document, fleet.settings)
    if fleet.settings.get("spot_max_age_s", 0) is None:
        document["scaling"]["spot_max_age_s"] = document["traffic"]["until_s"]
    if not any("layout" in node for node in document["fleet"]["nodes"]):
        document["planning"].pop("layouts", None)


def _limits(fleet: LiveFleet, kept: _Kept) -> dict[str, int]:
    """One minimum and maximum of instances for all endpoints."""
    names = {row["name"] for row in kept.models}
    limits = [row for row in fleet.endpoints if row["model"] in names]
    if not limits:
        raise LiveError(f"no endpoint is left of the models that could be simulated: {', '.join(sorted(names))}")
    return {
        "instances_min": min(row["instances_min"] for row in limits),
        "instances_max": max(1, *(row["instances_max"] for row in limits)),
    }


def _provisioning(fleet: LiveFleet, kept: _Kept) -> dict[str, Any]:
    """Start times as plans count them, those of the slowest. Plans take a region to hold a model's weights where it has
    instances, of whatever kind.
    """
    times = StartTimes.of_load(max(row["load_time_s"] for row in kept.rates.values()))
    held = {(row["model"], row["region"]) for row in fleet.instances}
    return {
        "local_s": times.local_s,
        "remote_s": times.remote_s,
        "spot_same_s": times.donated_same_s,
        "spot_other_s": times.donated_other_s,
        "weights": {
            row["name"]: sorted(region for model, region in held if model == row["name"]) for row in kept.models
        },
    }


def _fleet(fleet: LiveFleet, kept: _Kept, there: Counter[Place], profiles: Mapping[str, str]) -> dict[str, Any]:
    first = kept.gpu_types[0]
    return {
        "serving": "dedicated",
        "profile": profiles[first],
        **_memory(fleet, kept, first),
        "cost_per_hour": {gpu_type: fleet.prices[gpu_type] for gpu_type in kept.gpu_types},
        "nodes": _nodes(fleet, kept, profiles),
        "instances": [
            {"model": place.model, "region": place.region, "count": count}
            | ({"gpu_type": place.gpu_type} if kept.several else {})
            for place, count in sorted(there.items())
        ],
        **_adapters(kept),
    }


def _wanted(kept: _Kept, running: Iterable[Row]) -> Counter[Place]:
    """The instances on GPUs of their own that can be simulated."""
    places = (Place(row["model"], row["region"], row["gpu_type"]) for row in running if not row["pooled"])
    return Counter(place for place in places if (place.model, place.gpu_type) in kept.rates)


def _there(fleet: LiveFleet, kept: _Kept, wanted: Counter[Place]) -> Counter[Place]:
    """Those of the instances that the nodes have slots for."""
    slots = [
        {"region": node["region"], "gpu_type": node["gpu_type"], "gpus": gpus}
        for node in _alive(fleet)
        for gpus in slots_of_node(node).layout
    ]
    gpus = {place: kept.rates[place.model, place.gpu_type]["gpus"] for place in wanted}
    found = placed(wanted.elements(), gpus, slots)
    if not found and kept.pooling is None:
        raise LiveError(f"no instance of them runs on GPUs of its own of type {' or '.join(kept.gpu_types)}")
    return found


def _pooling(kept: _Kept) -> dict[str, Any]:
    if kept.pooling is None:
        return {}
    names = ("fill", "prompt_tokens", "output_tokens", "tbt_s", "round_s")
    pools = {"pools": kept.pooling["enabled"]} | {f"pool_{name}": kept.pooling[name] for name in names}
    if (reserve := kept.pooling.get("reserve")) is None:
        return pools
    return pools | {"reserve": True} | {f"reserve_{name}": reserve[name] for name in ("quantile", "correlation")}


def _model(model: Row, kept: _Kept) -> dict[str, Any]:
    named = {key: model[key] for key in ("name", "weights_bytes", "kv_bytes_per_token", "context_tokens")}
    if model.get("base"):
        named["base"] = model["base"]
    mine = {gpu_type: row for (name, gpu_type), row in kept.rates.items() if name == model["name"]}
    for key in ("tokens_per_s", "gpus"):
        values = {gpu_type: row[key] for gpu_type, row in sorted(mine.items())}
        named[key] = values if kept.several else values[kept.gpu_types[0]]
    return named


def _adapters(kept: _Kept) -> dict[str, int]:
    """Memory for all LoRA adapters on each slot."""
    size_bytes = sum(model["weights_bytes"] for model in kept.models if model.get("base"))
    return {"adapters_bytes": size_bytes} if size_bytes else {}


def _alive(fleet: LiveFleet) -> Iterable[Row]:
    """Nodes that take instances: neither silent nor draining."""
    return (
        node for node in fleet.nodes if node["gpu_type"] in fleet.gpu_types and node["alive"] and not node["draining"]
    )


def _nodes(fleet: LiveFleet, kept: _Kept, profiles: Mapping[str, str]) -> list[dict[str, Any]]:
    """Nodes of a kind, by region. What is not of the first GPU type says of which it is."""
    kinds: Counter[tuple[str, str, Slots, int]] = Counter()
    for node in _alive(fleet):
        host_bytes = (node["host_bytes"] or 0) if kept.pooling else 0
        kinds[node["region"], node["gpu_type"], slots_of_node(node), host_bytes] += 1
    own = {
        gpu_type: {"profile": profiles[gpu_type], **_memory(fleet, kept, gpu_type)} for gpu_type in kept.gpu_types[1:]
    }
    return [
        {"region": region, "count": count, **slots.keys()}
        | ({"host_bytes": host_bytes} if host_bytes else {})
        | own.get(gpu_type, {})
        for (region, gpu_type, slots, host_bytes), count in sorted(kinds.items())
        if gpu_type in kept.gpu_types
    ]


def _memory(fleet: LiveFleet, kept: _Kept, gpu_type: str) -> dict[str, int]:
    """Memory of a GPU for KV, and, for pools, what that leaves of nine tenths of it for weights."""
    kv_bytes, largest_bytes = _kv_bytes(fleet, kept, gpu_type), _largest_bytes(kept, gpu_type)
    if kept.pooling is None:
        return {"kv_bytes": kv_bytes}
    left_bytes = round(0.9 * _gpu_bytes(fleet, gpu_type) - kv_bytes)
    return {"kv_bytes": kv_bytes, "weights_bytes": max(largest_bytes, left_bytes)}


def _kv_bytes(fleet: LiveFleet, kept: _Kept, gpu_type: str) -> int:
    """What instances reported; else what the largest model leaves of nine tenths of a GPU's memory."""
    if reported := fleet.kv_bytes.get(gpu_type):
        return int(statistics.median(reported))
    return max(1, round(0.9 * _gpu_bytes(fleet, gpu_type) - _largest_bytes(kept, gpu_type)))


def _gpu_bytes(fleet: LiveFleet, gpu_type: str) -> float:
    slots = [slot for node in fleet.nodes if node["gpu_type"] == gpu_type for slot in node["slots"]]
    least_bytes: float = min(slot["memory_bytes"] / slot["gpus"] for slot in slots)
    return least_bytes


def _largest_bytes(kept: _Kept, gpu_type: str) -> int:
    largest_bytes: int = max(row["weights_bytes"] for row in kept.models if (row["name"], gpu_type) in kept.rates)
    return largest_bytes


def _notes(fleet: LiveFleet, demand: LiveDemand, kept: _Kept) -> Iterable[str]:
    """What is assumed, and which models are other ones here."""
    yield f"Made of the running fleet on {fleet.taken_at}; edit it and run `tidepool simulate` on it."
    simulated, learned = (f"{seconds / HOUR_S:.4g} h" for seconds in (demand.simulated_s, demand.learn_s))
    yield f"The last {simulated} of demand come again; forecasts learn from {learned} before."
    yield "Assumed, as the API does not tell: lengths of prompts and answers, shares of IW-F and IW-N."
    yield "Not taken over: models' own objectives, pinned counts of instances, refusals, settings without a key here."
    yield "One minimum and maximum of instances holds for all endpoints."
    if not fleet.settings:
        yield "The settings of the service may not be read with this key: strategy and thresholds are the defaults."
    if len({row["load_time_s"] for row in kept.rates.values()}) > 1:
        yield "One start time holds for all models and GPU types: that of the slowest."
    for gpu_type in kept.gpu_types:
        if not fleet.kv_bytes.get(gpu_type):
            yield f"No instance on {gpu_type} reported its KV memory: it is what the largest model leaves of 9/10 GPU."
    adapters = {row["name"] for row in fleet.models if row.get("base")}
    if whole := sorted(row["name"] for row in kept.models if row["name"] in adapters and not row["base"]):
        yield f"Adapters that take other GPUs than their bases are whole models here: {', '.join(whole)}."
    if left := sorted({row["name"] for row in fleet.models} - {row["name"] for row in kept.models}):
        types = " or ".join(kept.gpu_types)
        yield f"Models without demand or without a profile on {types} are left out: {', '.join(left)}."


def _notes_of_slots(fleet: LiveFleet, kept: _Kept, running: Iterable[Row], unplaced: Counter[Place]) -> Iterable[str]:
    """Which nodes, slots and instances are other ones here. `unplaced`: instances without a slot."""
    nodes = list(_alive(fleet))
    if any(slot["workers"] > 1 for node in nodes for slot in node["slots"]):
        yield "Workers that serve together are taken as slots of their own."
    if odd := sum(map(lacks_layout, nodes)):
        yield f"Of {odd} nodes only the largest slots are there: sizes that differ must be powers of two."
    if others := sorted({row["gpu_type"] for row in fleet.nodes} - set(kept.gpu_types)):
        yield f"Nodes of other GPU types are left out: {', '.join(others)}."
    if unplaced:
        told = ", ".join(f"{count} of {at.model} in {at.region}" for at, count in sorted(unplaced.items()))
        yield f"Instances for which no node that takes any has a free slot are left out: {told}."
    pooled = sum(row["pooled"] for row in running if row["gpu_type"] in kept.gpu_types)
    if kept.pooling is not None:
        yield "Plans pool as the plan in force did; a pool's slot has for weights what KV leaves of 9/10 of a GPU."
        if pooled:
            yield f"{pooled} pooled instances are not there at the beginning: the first plan starts them."
    elif pooled:
        yield f"{pooled} pooled instances are left out: the plan in force does not say how, or a node's host memory."
