"""The row of results on requests that move to idle instances: see `ops.bench.planner.rerouting`."""

from collections.abc import Mapping
from typing import Any

from ops.bench.results.row import DATA, ResultRow

_SEEDS = tuple(word for seed in (1, 2, 3) for word in ("--seed", str(seed)))


def _moves(answer: Any) -> dict[str, float]:
    """By strategy and arm: slow minutes, % late, and the 99th percentile of first tokens."""
    found: dict[str, float] = {}
    for row in answer:
        for arm in ("stays", "moves"):
            key, figures = f"{row['strategy'].replace('-', '_')}_{arm}", row[arm]
            found |= {f"{key}_slow": figures["slow_minutes"], f"{key}_p99": figures["ttft_p99_s"]}
            found[f"{key}_late"] = 100 * figures["late"]
    return found


def _texts(arm: str) -> str:
    strategies = ("reactive", "lt_i_median", "lt_d_reserve_median")
    return "; ".join(
        f"{{{name}_{arm}_slow:.1f}}, {{{name}_{arm}_late:.1f}} %, {{{name}_{arm}_p99:.0f}} s" for name in strategies
    )


REROUTING_ROWS: Mapping[str, ResultRow] = {
    "rerouting": ResultRow(
        what="eight times the traffic for 5 minutes, waiting requests move to idle instances, simulated: slow minutes,"
        " late first tokens, p99; with Reactive, LT-I, LT-D with a shared reserve",
        arguments=("-m", "ops.bench.planner.rerouting", "--data", f"{DATA}/", "--case", "burst", *_SEEDS, "--json"),
        values=_moves,
        text=_texts("moves"),
        against=f"requests stay where they were sent: {_texts('stays')}; goal 3 slow minutes",
        drawn="seeds 1 to 3, means",
    )
}
