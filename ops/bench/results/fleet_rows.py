"""Rows of results on simulated fleets: variants of a scenario, see `ops.bench.planner.variants`."""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from ops.bench.results.row import DATA, ResultRow

_SEEDS = ("1", "2", "3")
_DRAWN = "seeds 1 to 3, means"


def _pair(answer: Any) -> dict[str, float]:
    """The figures of two variants, numbered: means over seeds, the range of what is late, and the changes of hours from
    the second to the first.
    """
    keys = ("requests", "instance_hours", "gpu_hours", "late", "ttft_p95_s")
    variants = [
        [row for row in answer if row["variant"] == name] for name in dict.fromkeys(r["variant"] for r in answer)
    ]
    figures = {f"{key}{place}": mean(row[key] for row in rows) for place, rows in enumerate(variants) for key in keys}
    for place, rows in enumerate(variants):
        late = [row["late"] for row in rows]
        figures |= {f"late{place}_least": min(late), f"late{place}_most": max(late)}
    changes = {key: figures[f"{key}0"] / figures[f"{key}1"] - 1 for key in ("instance_hours", "gpu_hours")}
    return figures | {f"{key}_change": change for key, change in changes.items()}


def _variants(scenario: str, variants: tuple[str, str], settings: tuple[str, ...] = ()) -> tuple[str, ...]:
    return (
        *("-m", "ops.bench.planner.variants", f"ops/scenarios/{scenario}", "--json"),
        *(option for setting in settings for option in ("--set", setting)),
        *(option for variant in variants for option in ("--variant", variant)),
        *(option for seed in _SEEDS for option in ("--seed", seed)),
    )


def _siloed(rate_per_s: str, what: str, against: str, *, later: bool = False) -> ResultRow:
    return ResultRow(
        what=what + "{requests0:.0f} requests at " + f"{rate_per_s}/s, simulated: instance hours; late first tokens",
        arguments=_variants(
            "strategies.toml",
            ("scaling.strategy=reactive", "scaling.strategy=siloed"),
            (f"traffic.rate_per_s={rate_per_s}", "traffic.duration_s=21600", "planning.learn_s=0"),
        ),
        values=_pair,
        text="{instance_hours0:.1f} for {instance_hours1:.1f} ({instance_hours_change:+.0%}); "
        + ("**{late0:.1%} for {late1:.1%}**" if later else "{late0:.1%} for {late1:.1%}"),
        against=against,
        drawn=_DRAWN,
    )


def _pools(scenario: str, what: str) -> ResultRow:
    return ResultRow(
        what=f"{what}, simulated: GPU hours; first token p95",
        arguments=_variants(scenario, ("planning.pools=true", "planning.pools=false")),
        values=_pair,
        text="{gpu_hours0:.1f} for {gpu_hours1:.1f} ({gpu_hours_change:+.0%}); **{ttft_p95_s0:.2f} for"
        " {ttft_p95_s1:.3f} s**, {late0:.2%} ({late0_least:.2%} to {late0_most:.2%}) late",
        against="without pools, {late1:.2%} late",
        drawn=_DRAWN,
    )


_SILOED = {
    "siloed": _siloed(
        "4.8", "Reactive for all tiers against Siloed, six hours of the night, ", "paper: -34.5 %, on days", later=True
    ),
    "siloed-14": _siloed("14.4", "the same, ", "as above"),
    "siloed-29": _siloed("28.8", "the same, ", "as above"),
}
_ROUTERS = {
    "cache-aware": "ours",
    "threshold": "thresholds as in SGLang's router",
    "least-loaded": "least-loaded",
    "consistent-hash": "consistent hashing",
}


def _routed(answer: Any) -> dict[str, float]:
    """By router, the least share of the reuse that is saved and the longest p95 of first tokens, over the draws."""
    found = {}
    for router in _ROUTERS:
        draws = [row for row in answer if row["router"] == router]
        found[f"{router}_saved"] = min(row["saved"] / row["reuse"] for row in draws)
        found[f"{router}_p95_s"] = max(row["ttft_p95_s"] for row in draws)
    return found


def _routing(load: str, what: str) -> ResultRow:
    ours, *others = ((name, f"{{{key}_saved:.0%}}, {{{key}_p95_s:.1f}} s") for key, name in _ROUTERS.items())
    return ResultRow(
        what=f"{what} {load} times its rate: share of the trace's reuse that is saved, first token p95, worst of the"
        " draws",
        arguments=(
            *("-m", "ops.bench.papers.prefix_routing", f"{DATA}/mooncake/synthetic_trace.jsonl.gz"),
            *("--draws", "3", "--load", load, "--json"),
            *(option for router in _ROUTERS for option in ("--router", router)),
        ),
        values=_routed,
        text=ours[1],
        against="; ".join(f"{name} {figures}" for name, figures in others),
        drawn="the trace, and two draws of four fifths of its conversations",
    )


FLEET_ROWS: Mapping[str, ResultRow] = {
    **_SILOED,
    "pools-by-size": _pools(
        "simulate-mixed-pools.toml",
        "twelve models of one GPU and six of four, nodes with slots of both sizes, pools of each size in hourly plans",
    ),
    "pools-in-plans": _pools("simulate-pools.toml", "a long tail in hourly plans, 24 models in 2 regions, with pools"),
    "prefix-2": _routing("2", "routing by prefix, Mooncake's trace on 8 simulated instances of a 7B model at"),
    "prefix-4": _routing("4", "the same at"),
    "prefix-10": _routing("10", "the same, overloaded, at"),
}
"""By name. Their commands take one to ten minutes each."""
