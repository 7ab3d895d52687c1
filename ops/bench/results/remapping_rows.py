"""Rows of results on remapping: see `ops.bench.papers.remapping_sim`."""

from collections.abc import Mapping
from typing import Any

from ops.bench.results.row import DATA, ResultRow

_GROUPS = ("temporal", "uneven", "inputs", "spatial", "single")


def _tokens(answer: Any) -> dict[str, float]:
    """By how many percent a group has more tokens/s with remapping than vLLM has: here, and in the paper."""
    rows = {row["group"]: row for row in answer["published"] if row["figure"] == "tokens_per_s"}
    ours = {name: rows[name]["ours_percent"] for name in _GROUPS}
    return ours | {f"{name}_published": rows[name]["percent"] for name in _GROUPS}


def _list(suffix: str) -> str:
    return ", ".join(f"{{{name}{suffix}:+.0f}}" for name in _GROUPS) + " %"


REMAPPING_ROWS: Mapping[str, ResultRow] = {
    "remapping": ResultRow(
        what="tokens/s with remapping against vLLM's way, replay engine, 200 requests, steps that prefill (up to 2,048"
        " tokens) or decode: models by turns, uneven rates, long and short prompts, spatial, one model; means over the"
        " loads whose KV ran out",
        arguments=(
            *("-m", "ops.bench.papers.remapping_sim", "--data", f"{DATA}/"),
            *(argument for name in _GROUPS for argument in ("--group", name)),
            *("--rival", "vLLM", "--rival", "Oneiros", "--json"),
        ),
        values=_tokens,
        text=_list(""),
        against=f"paper, on GH200: {_list('_published')}",
        drawn="seed 0",
    )
}
