"""Rows of results on simulated fleets: scaling strategies by traffic, pools in hourly plans, routing by prefix."""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from ops.bench.results.row import DATA, ResultRow

_SCENARIOS = "ops/scenarios"
_VARIANTS = ("-m", "ops.bench.planner.variants")


def _pair(answer: Any) -> dict[str, float]:
    """The figures of two variants, numbered, and the changes of hours from the second to the first."""
    first, second = answer
    keys = ("requests", "instance_hours", "gpu_hours", "late", "ttft_p95_s")
    figures = {f"{key}{number}": row[key] for number, row in enumerate(answer) for key in keys}
    changes = {key: first[key] / second[key] - 1 for key in ("instance_hours", "gpu_hours")}
    return figures | {f"{key}_change": change for key, change in changes.items()}


def _siloed(rate: str, what: str) -> ResultRow:
    settings = (f"traffic.rate_per_s={rate}", "traffic.duration_s=21600", "planning.learn_s=0")
    variants = ("scaling.strategy=reactive", "scaling.strategy=siloed")
    return ResultRow(
        what=what,
        arguments=(
            *(*_VARIANTS, f"{_SCENARIOS}/strategies.toml", "--json"),
            *(option for setting in settings for option in ("--set", setting)),
            *(option for variant in variants for option in ("--variant", variant)),
        ),
        values=_pair,
        text="{instance_hours0:.1f} for {instance_hours1:.1f} h ({instance_hours_change:+.0%}); {late0:.1%} late for"
        " {late1:.1%}",
        against="paper: -34.5 %, on days",
        drawn="seed 1, one run",
    )


def _routers(answer: Any) -> dict[str, float]:
    """The mean p95 of first tokens and the mean share of prompts saved over draws, by router and load."""
    groups: dict[str, list[Any]] = {}
    for row in answer:
        groups.setdefault(f"{row['router'].replace('-', '_')}{row['load']:g}", []).append(row)
    return {
        f"{name}_{key}": mean(row[field] for row in rows)
        for name, rows in groups.items()
        for key, field in (("p95", "ttft_p95_s"), ("saved", "saved"))
    }


def _by_load(router: str) -> str:
    return ", ".join(f"{{{router}{load}_p95:.1f}}" for load in _LOADS)


_LOADS = ("2", "4", "10")
_ROUTERS = ("cache-aware", "least-loaded", "threshold", "consistent-hash")

FLEET_ROWS: Mapping[str, ResultRow] = {
    "siloed-4.8": _siloed(
        "4.8",
        "Reactive for all tiers against Siloed, six hours of the night, {requests0:.0f} requests at 4.8/s, simulated",
    ),
    "siloed-14.4": _siloed("14.4", "the same, {requests0:.0f} requests at 14.4/s"),
    "siloed-28.8": _siloed("28.8", "the same, {requests0:.0f} requests at 28.8/s"),
    "pools-in-plans": ResultRow(
        what="GPU hours of a long tail in hourly plans, 24 models in 2 regions, with pools; first token p95, simulated",
        arguments=(
            *(*_VARIANTS, f"{_SCENARIOS}/simulate-pools.toml", "--json"),
            *("--variant", "planning.pools=true", "--variant", "planning.pools=false"),
        ),
        values=_pair,
        text="{gpu_hours0:.0f} for {gpu_hours1:.0f} h ({gpu_hours_change:+.0%}); **{ttft_p95_s0:.2f} for"
        " {ttft_p95_s1:.3f} s**",
        against="without pools",
        drawn="seed 1, one run",
    ),
    "prefix-routing": ResultRow(
        what="routing by prefix, the Mooncake trace on 8 simulated instances at 2, 4 and 10 times its rate: first token"
        " p95 in s",
        arguments=(
            *("-m", "ops.bench.papers.prefix_routing", f"{DATA}/mooncake/synthetic_trace.jsonl.gz", "--draws", "3"),
            *(option for load in _LOADS for option in ("--load", load)),
            *(option for router in _ROUTERS for option in ("--router", router)),
            "--json",
        ),
        values=_routers,
        text=_by_load("cache_aware"),
        against=f"least-loaded {_by_load('least_loaded')}; thresholds as in SGLang's router {_by_load('threshold')};"
        f" consistent hashing {_by_load('consistent_hash')}",
        drawn="mean of draws 0 to 2",
    ),
}
"""By name. Their commands take some minutes each."""
