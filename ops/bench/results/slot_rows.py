"""Rows of results on slots that switch and are short of KV: see `ops.bench.papers.remapping_slots`."""

from collections.abc import Mapping
from typing import Any

from ops.bench.results.row import ResultRow

_FIGURES = ("tokens_per_s", "in_time_percent", "late_percent")
_RATES = (2, 3, 4)


def _both(answer: Any) -> dict[str, float]:
    """The figures of each way, in the order of the rates."""
    return {
        f"{way}_{figure}_{place}": row[figure]
        for way in ("auto", "swap")
        for place, row in enumerate(row for row in answer["runs"] if row["way"] == way)
        for figure in _FIGURES
    }


def _text(way: str, *, worse: bool) -> str:
    """Tokens/s, tokens in time and late first tokens at each rate; where they are `worse`, the last in bold but for the
    first rate, at which none is late.
    """

    def each(figure: str, form: str, worse: bool = False) -> str:
        fields = [f"{{{way}_{figure}_{place}:{form}}}" for place in range(len(_RATES))]
        return ", ".join(f"**{field}**" if worse and place else field for place, field in enumerate(fields))

    figures = (("tokens_per_s", ".0f", False), ("in_time_percent", ".1f", False), ("late_percent", ".1f", worse))
    speed, *shares = (each(*figure) for figure in figures)
    return "; ".join((speed, *(f"{share} %" for share in shares)))


def _row(case: str, link: str) -> ResultRow:
    *most, last = map(str, _RATES)
    rates = f"{', '.join(most)} and {last}"
    return ResultRow(
        what=f"a slot for two of four models of 13B, {rates} requests/s in all, 16 GB of KV, {link}, replay engine:"
        " tokens/s; tokens in time; late first tokens, with KV in the next model's place where that pays",
        arguments=(
            *("-m", "ops.bench.papers.remapping_slots", "--case", case, "--way", "swap", "--way", "auto"),
            *(argument for rate in _RATES for argument in ("--rate", f"{rate}")),
            "--json",
        ),
        values=_both,
        text=_text("auto", worse=True),
        against="KV swapped only: " + _text("swap", worse=False),
        drawn="seeds 1 to 3, means",
    )


SLOT_ROWS: Mapping[str, ResultRow] = {
    "lent-places-fast": _row("fast-link", "427 GB/s to the host"),
    "lent-places-pcie": _row("four", "PCIe 5"),
}
