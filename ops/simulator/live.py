"""A scenario from a running Tidepool: its fleet, and what came in the past as what comes next.

The demand of the last hours comes again; what came before is what forecasts learn from. The admin API does not tell
everything that a simulation must know: `notes` says what was assumed, and the file can be edited.
"""

import csv
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

DAY_S = 86_400
HOUR_S = 3600
COLUMNS = ("start_s", "region", "model", "tokens_per_s", "tier")
Row = Mapping[str, Any]


class LiveError(ValueError):
    """A fleet of which no scenario can be made; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class LiveFleet:
    """Answers of the admin API, as they came. `kv_bytes`: of instances of that GPU type that have told theirs."""

    gpu_type: str
    taken_at: str
    regions: Sequence[Row]
    latencies: Sequence[Row]
    nodes: Sequence[Row]
    instances: Sequence[Row]
    models: Sequence[Row]
    profiles: Sequence[Row]
    endpoints: Sequence[Row]
    kv_bytes: Sequence[int]


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
        """As TOML, the notes first."""
        return "".join(f"# {note}\n" for note in self.notes) + "\n" + tomlkit.dumps(self.document)


def cut_demand(rows: Iterable[tuple[int, str, str, float, str]], *, simulated_s: int, learn_s_max: int) -> LiveDemand:
    """The last `simulated_s` seconds, and up to `learn_s_max` before them. It begins at a whole hour.

    Raises:
        LiveError: there is not an hour of it.
    """
    ordered = sorted(rows)
    if not ordered:
        raise LiveError("no demand is known: nothing came, or none was imported")
    until_s = ordered[-1][0] + 60
    since_s = max(-(-ordered[0][0] // HOUR_S) * HOUR_S, until_s - simulated_s - learn_s_max)
    if until_s - since_s < HOUR_S:
        raise LiveError(f"{(until_s - ordered[0][0]) // 60} minutes of demand are known; a whole hour is needed")
    learn_s = max(0, (until_s - since_s - simulated_s) // 60 * 60)
    kept = [row for row in ordered if row[0] >= since_s]
    return LiveDemand(rows=kept, learn_s=learn_s, simulated_s=until_s - since_s - learn_s)


def live_scenario(fleet: LiveFleet, demand: LiveDemand, *, demand_file: str, profile: str) -> LiveScenario:
    """The scenario. `demand_file`: where its demand lies, beside it; `profile`: of the GPU type.

    Raises:
        LiveError: the fleet serves nothing that could be simulated.
    """
    rates = {row["model"]: row for row in fleet.profiles if row["gpu_type"] == fleet.gpu_type}
    asked = {row[2] for row in demand.rows}
    models = [row for row in fleet.models if row["name"] in rates and row["name"] in asked]
    names = {row["name"] for row in models}
    if not names:
        raise LiveError(f"no model with demand has a profile on {fleet.gpu_type}")
    running = [row for row in fleet.instances if row["gpu_type"] == fleet.gpu_type and row["desired"] == "running"]
    counts = Counter((row["model"], row["region"]) for row in running if not row["pooled"] and row["model"] in names)
    if not counts:
        raise LiveError(f"no instance of them runs on GPUs of its own of type {fleet.gpu_type}")
    nodes = _nodes(fleet)
    limits = [row for row in fleet.endpoints if row["model"] in names]
    slow_s = max(rates[name]["load_time_s"] for name in names)
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
        "fleet": {
            "serving": "dedicated",
            "profile": profile,
            "kv_bytes": _kv_bytes(fleet, models),
            "nodes": nodes,
            "instances": [
                {"model": model, "region": region, "count": count} for (model, region), count in sorted(counts.items())
            ],
        },
        "scaling": {
            "strategy": "lt-i",
            "instances_min": min(row["instances_min"] for row in limits),
            "instances_max": max(1, *(row["instances_max"] for row in limits)),
        },
        "planning": {"learn_s": demand.learn_s},
        "provisioning": {"local_s": slow_s, "spot_other_s": slow_s},
        "models": [_model(row, rates[row["name"]]) for row in models],
    }
    return LiveScenario(document=document, notes=list(_notes(fleet, demand, names, running)))


def write_demand(path: Path, demand: LiveDemand) -> None:
    """Write its rows as a CSV. Raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(demand.rows)


def _model(model: Row, rates: Row) -> dict[str, Any]:
    named = {key: model[key] for key in ("name", "weights_bytes", "kv_bytes_per_token", "context_tokens")}
    return named | {"tokens_per_s": rates["tokens_per_s"], "gpus": rates["gpus"]}


def _nodes(fleet: LiveFleet) -> list[dict[str, Any]]:
    """Nodes of a kind, by region. One that is silent or drains is not there; nor are slots smaller than the largest."""
    kinds: Counter[tuple[str, int, int]] = Counter()
    for node in fleet.nodes:
        if node["gpu_type"] == fleet.gpu_type and node["alive"] and not node["draining"]:
            gpus = max(slot["gpus"] for slot in node["slots"])
            kinds[node["region"], sum(slot["gpus"] == gpus for slot in node["slots"]), gpus] += 1
    if not kinds:
        raise LiveError(f"no node of {fleet.gpu_type} is alive")
    return [
        {"region": region, "count": count, "slots": slots, "gpus": gpus}
        for (region, slots, gpus), count in sorted(kinds.items())
    ]


def _kv_bytes(fleet: LiveFleet, models: Sequence[Row]) -> int:
    """What instances told; else what the largest model leaves of nine tenths of a GPU's memory."""
    if fleet.kv_bytes:
        return int(statistics.median(fleet.kv_bytes))
    slots = [slot for node in fleet.nodes if node["gpu_type"] == fleet.gpu_type for slot in node["slots"]]
    gpu_bytes: float = min(slot["memory_bytes"] / slot["gpus"] for slot in slots)
    largest_bytes: int = max(row["weights_bytes"] for row in models)
    return max(1, round(0.9 * gpu_bytes - largest_bytes))


def _notes(fleet: LiveFleet, demand: LiveDemand, names: set[str], running: Sequence[Row]) -> Iterable[str]:
    yield f"Made of the running fleet on {fleet.taken_at}; edit it and run `tidepool simulate` on it."
    simulated, learned = (f"{seconds / HOUR_S:.4g} h" for seconds in (demand.simulated_s, demand.learn_s))
    yield f"The last {simulated} of demand come again; forecasts learn from {learned} before."
    yield "Assumed, as the API does not tell: lengths of prompts and answers, shares of IW-F and IW-N, the strategy."
    yield "Objectives are the tiers' defaults; one minimum and maximum of instances holds for all endpoints."
    if not fleet.kv_bytes:
        yield "No instance told its KV memory: kv_bytes is what the largest model leaves of 9/10 of a GPU."
    if pooled := sum(row["pooled"] for row in running):
        yield f"{pooled} pooled instances are left out: this scenario is of instances on GPUs of their own."
    others = sorted({row["gpu_type"] for row in fleet.nodes} - {fleet.gpu_type})
    if others:
        yield f"Nodes of other GPU types are left out: {', '.join(others)}."
    if left := sorted({row["name"] for row in fleet.models} - names):
        yield f"Models without demand or without a profile on {fleet.gpu_type} are left out: {', '.join(left)}."
