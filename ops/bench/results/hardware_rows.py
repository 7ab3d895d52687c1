"""Rows of results on Aegaeon's Figure 17: see `ops.bench.papers.aegaeon_hardware`."""

from collections.abc import Mapping
from typing import Any

from ops.bench.results.row import DATA, ResultRow

_SCALES = (0.5, 1.0, 2.0)
_METRICS = ("service", "tokens")
_SYSTEMS = {
    "pooled-both-deadlines": "pool, aggregated, time slices by deadlines",
    "pooled-both": "pool, aggregated, in rounds",
    "pooled": "pool, disaggregated, in rounds, as in the paper",
    "request-level": "whole requests from one queue",
}


def _kept(answer: Any) -> dict[str, float]:
    """What is kept at each scale of the objective, by each metric."""
    by_scale = {float(row["scaled"].partition(" x ")[2]): row for row in answer["kept"]}
    return {f"{metric}_{place}": by_scale[scale][metric] for place, scale in enumerate(_SCALES) for metric in _METRICS}


_LOSSES = {
    "a10-pooled-both-deadlines": "tokens_0",
    "a10-pooled-both": "tokens_0",
    "a10-pooled": "service_0 service_1 tokens_0 tokens_1",
    "large-pooled": "service_1 tokens_0 tokens_1 tokens_2",
}
"""Where less is kept than by whole requests."""


def _text(row: str) -> str:
    """Service at each scale, then tokens; losses in bold."""

    def figure(name: str) -> str:
        return f"**{{{name}:g}}**" if name in _LOSSES.get(row, "").split() else f"{{{name}:g}}"

    return "; ".join(", ".join(figure(f"{metric}_{place}") for place in range(len(_SCALES))) for metric in _METRICS)


def _rows(command: str, what: str) -> dict[str, ResultRow]:
    return {
        f"{command}-{system}": ResultRow(
            what=(f"{what}: " if place == 0 else "the same: ") + name,
            arguments=(
                *("-m", "ops.bench.papers.aegaeon_hardware", command, f"{DATA}/aegaeon/workloads.csv.gz"),
                *("--draws", "3", "--json", "--system", system),
            ),
            values=_kept,
            text=_text(f"{command}-{system}"),
            against='paper: "decent", much better where objectives are loose' if place == 0 else "as above",
            drawn="draws 1 to 3, means",
        )
        for place, (system, name) in enumerate(_SYSTEMS.items())
    }


HARDWARE_ROWS: Mapping[str, ResultRow] = {
    **_rows(
        "a10",
        "four A10 without a prefetch (Figure 17, left): models of 6B and 7B at 0.1 requests/s each up to which 90 % are"
        " kept with 0.5, 1, 2 times the time between tokens, by service; by tokens",
    ),
    **_rows(
        "large",
        "four models of 72B on two slots of four H800, guessed step times (Figure 17, right): requests/s of each up to"
        " which 90 % are kept with 0.5, 1, 2 times the time to the first token, by service; by tokens",
    ),
}
"""By name. Their commands take one to five minutes each."""
