"""Rows of results on simulated fleets: variants of a scenario, see `ops.bench.planner.variants`."""

from collections.abc import Mapping
from typing import Any

from ops.bench.results.row import ResultRow


def _pair(answer: Any) -> dict[str, float]:
    """The figures of two variants, numbered, and the changes of hours from the second to the first."""
    first, second = answer
    keys = ("requests", "instance_hours", "gpu_hours", "late", "ttft_p95_s")
    figures = {f"{key}{number}": row[key] for number, row in enumerate(answer) for key in keys}
    changes = {key: first[key] / second[key] - 1 for key in ("instance_hours", "gpu_hours")}
    return figures | {f"{key}_change": change for key, change in changes.items()}


def _variants(scenario: str, variants: tuple[str, str], settings: tuple[str, ...] = ()) -> tuple[str, ...]:
    return (
        *("-m", "ops.bench.planner.variants", f"ops/scenarios/{scenario}", "--json"),
        *(option for setting in settings for option in ("--set", setting)),
        *(option for variant in variants for option in ("--variant", variant)),
    )


FLEET_ROWS: Mapping[str, ResultRow] = {
    "siloed": ResultRow(
        what="Reactive for all tiers against Siloed, six hours of the night, {requests0:.0f} requests at 4.8/s,"
        " simulated: instance hours; late first tokens",
        arguments=_variants(
            "strategies.toml",
            ("scaling.strategy=reactive", "scaling.strategy=siloed"),
            ("traffic.rate_per_s=4.8", "traffic.duration_s=21600", "planning.learn_s=0"),
        ),
        values=_pair,
        text="{instance_hours0:.1f} for {instance_hours1:.1f} ({instance_hours_change:+.0%}); {late0:.1%} for"
        " {late1:.1%}",
        against="paper: -34.5 %, on days; by traffic above",
        drawn="seed 1, one run",
    ),
    "pools-in-plans": ResultRow(
        what="a long tail in hourly plans, 24 models in 2 regions, with pools, simulated: GPU hours; first token p95",
        arguments=_variants("simulate-pools.toml", ("planning.pools=true", "planning.pools=false")),
        values=_pair,
        text="{gpu_hours0:.1f} for {gpu_hours1:.1f} ({gpu_hours_change:+.0%}); **{ttft_p95_s0:.2f} for"
        " {ttft_p95_s1:.3f} s**",
        against="without pools",
        drawn="seed 1, one run",
    ),
}
"""By name. Their commands take a minute or two each."""
