"""Where time goes in a pool, from the simulator's log of its slots: Aegaeon's Figures 14 and 15.

A request's time, from its arrival to its last token, is in five stages: it waits for its prefill (loads of weights
included), is prefilled, has its KV transferred between memories, decodes, and waits to decode. The paper's control
overhead (indices, events) is not simulated. A slot's time, from the first arrival to the last token, is in five states:
it prefills, decodes, waits for weights, waits for KV with nothing to compute, or idles. A switch takes as long as the
slot waits for the model's weights: nothing where they were prefetched.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any

from ops.bench.papers.aegaeon_testbed import Setup, scenario_of, size_of
from ops.bench.papers.workloads import Workload
from ops.client.screen import Columns, print_table
from ops.plots.lines_plot import LinesPanel, draw_lines
from ops.simulator.run import simulate
from ops.simulator.servers.pool_log import Activity, PoolLog, RequestTimes

STAGES: Mapping[str, Callable[[RequestTimes], float]] = {
    "prefill waiting": lambda times: times.prefill_wait_s,
    "prefill": lambda times: times.prefill_s,
    "KV transfer": lambda times: times.kv_s,
    "decode": lambda times: times.decode_s,
    "decode waiting": lambda times: times.decode_wait_s,
}
ACTIVITIES: tuple[Activity, ...] = ("prefill", "decode", "weights", "kv")
HIDDEN_S = 0.01
"""A switch that takes no longer counts as near-instantaneous."""
QUANTILES = tuple(place / 100 for place in range(1, 101))


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Of `count` times. `hidden`: the share of those of at most `HIDDEN_S`; `in_a_second`: of at most 1 s. `quantiles`:
    in seconds, by share.
    """

    count: int
    mean_s: float
    hidden: float
    in_a_second: float
    quantiles: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The times of a workload. `requests`, `slots`: shares of all their time by stage and state; `switches`: seconds by
    model; `kv`: seconds of each request.
    """

    requests: Mapping[str, float]
    slots: Mapping[str, float]
    switches: Mapping[str, Sequence[float]]
    kv: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Where time goes with so many models: shares as mean, least and most over the draws, distributions over all."""

    setup: str
    models: int
    rate: str
    draws: int
    requests: Mapping[str, Mapping[str, float]]
    slots: Mapping[str, Mapping[str, float]]
    switches: Mapping[str, Distribution]
    kv: Distribution


def measure_draw(setup: Setup, workload: Workload) -> Draw:
    """Serve a workload to its end, with a log of the pool's slots."""
    log = PoolLog()
    simulate(scenario_of(setup, workload), log=log)
    ended = [times for times in log.requests.values() if times.ended]
    total_s = sum(times.last_s - times.arrived_s for times in ended)
    span_s = max(times.last_s for times in ended) - min(times.arrived_s for times in ended)
    slots_s = span_s * len(log.slots)
    busy: dict[str, float] = {state: sum(slot[state] for slot in log.slots) / slots_s for state in ACTIVITIES}
    switches: dict[str, list[float]] = {}
    for switch in log.switches:
        switches.setdefault(size_of(switch.model), []).append(switch.waited_s)
    return Draw(
        requests={stage: sum(map(seconds, ended)) / total_s for stage, seconds in STAGES.items()},
        slots={**busy, "idle": 1.0 - sum(busy.values())},
        switches=switches,
        kv=[times.kv_s for times in ended],
    )


def summed(setup: str, workload: Workload, found: Sequence[Draw]) -> Times:
    """The times of the draws of one size and rate together. `setup`: its name; `workload`: one of them."""
    sizes = sorted({size for draw in found for size in draw.switches}, key=lambda size: int(size.rstrip("B")))
    return Times(
        setup=setup,
        models=workload.models,
        rate=workload.rate,
        draws=len(found),
        requests=_ranges([draw.requests for draw in found]),
        slots=_ranges([draw.slots for draw in found]),
        switches={
            size: distribution([seconds for draw in found for seconds in draw.switches.get(size, ())]) for size in sizes
        },
        kv=distribution([seconds for draw in found for seconds in draw.kv]),
    )


def _ranges(draws: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"mean": mean(shares), "low": min(shares), "high": max(shares)}
        for name in draws[0]
        for shares in [[draw[name] for draw in draws]]
    }


def distribution(seconds: Iterable[float]) -> Distribution:
    """The distribution of at least one time."""
    ordered = sorted(seconds)
    count = len(ordered)
    return Distribution(
        count=count,
        mean_s=mean(ordered),
        hidden=bisect_right(ordered, HIDDEN_S) / count,
        in_a_second=bisect_right(ordered, 1.0) / count,
        quantiles={f"{share:g}": ordered[ceil(share * count) - 1] for share in QUANTILES},
    )


def show_times(rows: Sequence[Times]) -> None:
    """Print the shares of requests and of slots, and the distributions."""
    title = "Where time goes in pools of 16 GPUs, % of all requests' time, and of all slots'"
    print_table(title, SHARE_COLUMNS, map(asdict, rows))
    print_table("Waits for weights at a switch, and requests' KV transfers, in s", TIME_COLUMNS, _time_rows(rows))


def _time_rows(rows: Iterable[Times]) -> Iterator[Mapping[str, Any]]:
    for row in rows:
        for name, times in (*((f"switch, {size}", each) for size, each in row.switches.items()), ("KV", row.kv)):
            yield {"setup": row.setup, "models": row.models, "rate": row.rate, "of": name, **asdict(times)}


def _share(kind: str, name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "{mean:.1%}".format(**row[kind][name])


def _quantile(share: float) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{row['quantiles'][f'{share:g}']:.2f}"


SHARE_COLUMNS: Columns = {
    "setup": "setup",
    "models": "models",
    "rate": "rate",
    **{stage: _share("requests", stage) for stage in STAGES},
    **{f"slots: {state}": _share("slots", state) for state in (*ACTIVITIES, "idle")},
}
TIME_COLUMNS: Columns = {
    "setup": "setup",
    "models": "models",
    "rate": "rate",
    "of": "of",
    "times": "count",
    "within 10 ms": lambda row: f"{row['hidden']:.0%}",
    "within 1 s": lambda row: f"{row['in_a_second']:.0%}",
    **{f"p{100 * share:g}": _quantile(share) for share in (0.5, 0.9, 0.99, 1.0)},
}


def draw_times(rows: Sequence[Times], plot: Path) -> None:
    """Draw, for each setup, the shares of requests' time by the number of models, and the distributions with most."""
    panels = []
    for setup in dict.fromkeys(row.setup for row in rows):
        mine = sorted((row for row in rows if row.setup == setup), key=lambda row: row.models)
        most = mine[-1]
        panels.append(
            LinesPanel(
                title=f"{setup}, {most.rate} requests/s of each model: requests' time by stage (Figure 14)",
                x_label="models",
                y_label="share",
                lines={stage: [(row.models, row.requests[stage]["mean"]) for row in mine] for stage in STAGES},
            )
        )
        times = {f"switch to {size}": each for size, each in most.switches.items()} | {"a request's KV": most.kv}
        panels.append(
            LinesPanel(
                title=f"{setup}, {most.models} models: waits for weights and transfers of KV (Figure 15)",
                x_label="s",
                y_label="share that takes no longer",
                lines={name: _points(each) for name, each in times.items()},
            )
        )
    draw_lines(panels, "Where time goes in pools of 16 GPUs", plot)


def _points(times: Distribution) -> list[tuple[float, float]]:
    return [(seconds, float(share)) for share, seconds in times.quantiles.items()]
