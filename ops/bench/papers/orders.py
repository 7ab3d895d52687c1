"""What the order of service does to each tier when prompts pile up: `python -m ops.bench.papers.orders --help`.

SageServe 7.2.6: FCFS, EDF, PF and DPA at a load where FCFS misses the first token's deadline of 45 % of IW-F requests
and of 25 % of the IW-N ones. Here an instance of a 13B model serves both tiers, one IW-F request to three others, and a
burst comes that it cannot keep up with, so strong and long that FCFS misses about as much.

The deadlines are the live service's own, 1 s for IW-F and 60 s for IW-N. The paper's for IW-N must be some 6 s, since
FCFS kept it for three quarters of the requests, the third quartile being 5.6 s: there EDF is further from PF than here.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, get_args

import typer

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.ordering import Order
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import PROFILES, Scenario

PUBLISHED: Mapping[Order, tuple[int, int]] = {"fcfs": (45, 25), "edf": (31, 34), "pf": (24, 60), "dpa": (28, 38)}
"""Percent of IW-F and of IW-N requests."""
COLUMNS: Columns = {
    "order": "order",
    "IW-F missed": lambda row: f"{row['fast_missed']:.1%}",
    "IW-N missed": lambda row: f"{row['normal_missed']:.1%}",
    "published": lambda row: "{} %, {} %".format(*PUBLISHED[row["order"]]),
    "IW-F TTFT p75": lambda row: f"{row['fast_p75_s']:.1f} s",
    "IW-N TTFT p75": lambda row: f"{row['normal_p75_s']:.1f} s",
    "seeds": "seeds",
}


@dataclass(frozen=True, kw_only=True)
class Missed:
    """Shares of requests with a late first token, and third quartiles of TTFT; means over seeds."""

    order: Order
    fast_missed: float
    normal_missed: float
    fast_p75_s: float
    normal_p75_s: float
    seeds: int


def scenario_of(order: Order, *, rate_per_s: float, burst: float, burst_s: float, duration_s: float) -> Scenario:
    """Traffic with one burst."""
    return Scenario.model_validate(
        {
            "name": f"orders, {order}",
            "regions": ["one"],
            "traffic": {
                "kind": "generated",
                "rate_per_s": rate_per_s,
                "duration_s": duration_s,
                "origins": {"one": 1},
                "tiers": {"IW-F": 1, "IW-N": 3},
                "prompt_tokens": {"median": 5000, "spread": 0.4, "most": 8000},
                "output_tokens": {"median": 60, "spread": 0.8, "most": 400},
                "bursts": [{"start_s": duration_s / 4, "duration_s": burst_s, "factor": burst}],
            },
            "models": [{"name": "m", "weights_bytes": 26 * 10**9, "kv_bytes_per_token": 200_000}],
            "fleet": {
                "serving": "dedicated",
                "profile": str(PROFILES / "h800.toml"),
                "kv_bytes": 50 * 10**9,
                "instances": [{"model": "m", "region": "one", "count": 1}],
            },
            "policy": {"order": order},
        }
    )


def measure_order(order: Order, seeds: int, **load: float) -> Missed:
    """Serve the load once for each seed."""
    scenario = scenario_of(order, **load)
    found = []
    for seed in range(1, seeds + 1):
        world = simulate(scenario, seed=seed).world
        fast, normal = world.tallies["m", Tier.IW_F], world.tallies["m", Tier.IW_N]
        shares = [tally.ttft_violations / tally.ended for tally in (fast, normal)]
        found.append((*shares, fast.ttft.quantile(0.75), normal.ttft.quantile(0.75)))
    means = [sum(values) / seeds for values in zip(*found, strict=True)]
    return Missed(
        order=order,
        fast_missed=means[0],
        normal_missed=means[1],
        fast_p75_s=means[2],
        normal_p75_s=means[3],
        seeds=seeds,
    )


def main(
    rate_per_s: Annotated[float, typer.Option(min=0.1, help="Requests per second outside of the burst.")] = 1.0,
    burst: Annotated[float, typer.Option(min=1.0, help="How many times as many come in it.")] = 6.0,
    burst_s: Annotated[float, typer.Option(min=1.0, help="How long it lasts.")] = 60.0,
    duration_s: Annotated[float, typer.Option(min=60.0, help="How long the whole load lasts.")] = 1100.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs that are averaged.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Deadlines missed by tier under each order of service.

    \b
    Example:
      python -m ops.bench.papers.orders --seeds 5
    """
    rows = []
    for order in get_args(Order):
        load = {"rate_per_s": rate_per_s, "burst": burst, "burst_s": burst_s, "duration_s": duration_s}
        missed = measure_order(order, seeds, **load)
        rows.append(asdict(missed))
        notes().print(f"{order} done")
    if as_json:
        print_json(rows)
    else:
        print_table("Late first tokens by the order of service", COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
