"""The rows of results on how instances are chosen and in which order they serve: see `ops.bench.planner.serving`,
`ops.bench.planner.stale_reports` and `ops.bench.papers.orders`.
"""

from collections.abc import Mapping
from typing import Any, get_args

from dataplane.scheduling.ordering import Order
from ops.bench.results.row import DATA, ResultRow

_SEEDS = tuple(word for seed in (1, 2, 3) for word in ("--seed", str(seed)))
_FIGURES = {"slow_minutes": 1, "late": 100, "normal_late": 100, "ttft_p95_s": 1, "ttft_p99_s": 1, "instance_hours": 1}


def _servings(answer: Any) -> dict[str, float]:
    """Figures by strategy and serving; shares in percent."""
    return {
        f"{row['strategy']}_{row['serving']}_{key}".replace("-", "_"): by * row[key]
        for row in answer
        for key, by in _FIGURES.items()
    }


def _texts(strategies: tuple[str, ...], serving: str) -> str:
    """Slow minutes, late first tokens, p99 of each strategy."""
    names = [f"{strategy}_{serving}".replace("-", "_") for strategy in strategies]
    return "; ".join(
        f"{{{name}_slow_minutes:.1f}}, {{{name}_late:.1f}} %, {{{name}_ttft_p99_s:.0f}} s" for name in names
    )


def _serving_row(case: str, what: str, strategies: tuple[str, ...], goal: str = "") -> ResultRow:
    chosen = [word for strategy in strategies for word in ("--strategy", strategy)]
    servings = ("--serving", "paper", "--serving", "edf-timely-moves")
    return ResultRow(
        what=f"{what}, simulated, by deadline, well in time first, and what waits moves: slow minutes, late first"
        " tokens, p99",
        arguments=(
            *("-m", "ops.bench.planner.serving", "--data", f"{DATA}/", "--case", case, *chosen, *servings),
            *(*_SEEDS, "--json"),
        ),
        values=_servings,
        text=_texts(strategies, "edf-timely-moves"),
        against="first come, first served, and the shortest queue in time, as SageServe:"
        f" {_texts(strategies, 'paper')}{goal}",
        drawn="seeds 1 to 3, means",
    )


def _stale(answer: Any) -> dict[str, float]:
    """By queues and, where gateways tell each other what they send, after how many milliseconds."""
    found: dict[str, float] = {}
    for row in answer:
        name = row["queues"] if row["told_s"] is None else f"{row['queues']}_{1000 * row['told_s']:.0f}"
        found |= {f"late_{name}": 100 * row["late"], f"p95_{name}": row["ttft_p95_s"]}
    return found


def _orders(answer: Any) -> dict[str, float]:
    return {f"{row['order']}_{tier}": 100 * row[f"{tier}_missed"] for row in answer for tier in ("fast", "normal")}


SERVING_ROWS: Mapping[str, ResultRow] = {
    "serving-burst": _serving_row(
        "burst",
        "eight times the traffic for 5 minutes with Reactive, LT-I, LT-D with a shared reserve",
        ("reactive", "lt-i-median", "lt-d-reserve-median"),
        "; goal 3 slow minutes",
    ),
    "serving-servegen": _serving_row(
        "servegen-day", "ServeGen's day with Reactive, LT-I, LT-D", ("reactive", "lt-i-median", "lt-d-median")
    ),
    "stale-reports": ResultRow(
        what="16 gateways route by reports of a second ago and, 30 or 150 ms later, by each other's requests, to the"
        " shorter of two drawn queues; 10 instances busy for two thirds of the time, simulated: late first tokens, p95",
        arguments=(
            *("-m", "ops.bench.planner.stale_reports", "--gateways", "16", "--rate", "65"),
            *("--draws", "3", "--json"),
        ),
        values=_stale,
        text="{late_two_30:.1f} %, {p95_two_30:.2f} s; {late_two_150:.1f} %, {p95_two_150:.2f} s",
        against="by reports alone {late_two:.1f} %, {p95_two:.2f} s, and the shortest of all queues {late_all:.1f} %,"
        " {p95_all:.2f} s",
        drawn="three draws, means",
    ),
    "orders": ResultRow(
        what="late first tokens of IW-F and IW-N where prompts pile up on one instance, simulated: first come first"
        " served; by deadline; by tier; DPA",
        arguments=("-m", "ops.bench.papers.orders", "--seeds", "5", "--json"),
        values=_orders,
        text="; ".join(f"{{{order}_fast:.0f}}, {{{order}_normal:.0f}} %" for order in get_args(Order)),
        against="SageServe 7.2.6: 45, 25 %; 31, 34 %; 24, 60 %; 28, 38 %",
        drawn="seeds 1 to 5, means",
    ),
}
