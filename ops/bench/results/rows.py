"""The rows of `ops/docs/results.md` that `make results` makes: a command, and what its answer says."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from ops.bench.results.aegaeon_rows import AEGAEON_ROWS
from ops.bench.results.fleet_rows import FLEET_ROWS
from ops.bench.results.forecast_rows import FORECAST_ROWS
from ops.bench.results.hardware_rows import HARDWARE_ROWS
from ops.bench.results.placement_rows import PLACEMENT_ROWS
from ops.bench.results.remapping_rows import REMAPPING_ROWS
from ops.bench.results.row import DATA, ResultRow
from ops.bench.results.serving_rows import SERVING_ROWS
from ops.bench.results.slot_rows import SLOT_ROWS


def _fleet(answer: Any) -> dict[str, float]:
    before, after = answer["dedicated_gpus"], answer["pooled_gpus"]
    return {"before": before, "after": after, "change": after / before - 1}


def _beside(answer: Any) -> dict[str, float]:
    ours = next(row for row in answer["rows"] if row["arm"].startswith("AIMD"))
    return {"moves": ours["ours_moves"], "minutes": ours["ours_took_min"], "failed": ours["ours_failed"]}


def _quantized(answer: Any) -> dict[str, float]:
    four, eight = (
        {f"{key}{bits}": row[key] for key in ("bytes", "switch", "step")}
        for row, bits in zip(answer, (4, 8), strict=True)
    )
    return {**four, **eight}


def _quantized_row(model: str, text: str) -> ResultRow:
    return ResultRow(
        what=f"a model of {model} parameters in 4 bits (GPTQ) and in FP8 over itself in bfloat16, on CPU: a switch; the"
        " products of a layer on one token",
        arguments=("-m", "ops.bench.engine.quantized", "--model", model, "--rounds", "9", "--json"),
        values=_quantized,
        text=f"{text}, {{switch8:.2f}}x; {{step4:.2f}}x, **{{step8:.1f}}x**",
        against="goal for the switch in 4 bits 0.35x; its bytes are {bytes4:.2f}x",
        drawn="nothing; timed, medians of 9 rounds",
        tolerance=0.5,
    )


def _guesses(answer: Any) -> dict[str, float]:
    figures = {}
    for kind, is_group in (("one", False), ("group", True)):
        rows = [row for row in answer if (row["gpus"] > 1) is is_group]
        figures[f"sets_{kind}"] = float(len(rows))
        for step in ("prefill", "decode"):
            factors = [max(row[step], 1 / row[step]) for row in rows]
            figures |= {f"{step}_{kind}": median(factors), f"{step}_{kind}_most": max(factors)}
    return figures


ROWS: Mapping[str, ResultRow] = {
    **AEGAEON_ROWS,
    **FLEET_ROWS,
    **FORECAST_ROWS,
    **HARDWARE_ROWS,
    **PLACEMENT_ROWS,
    **REMAPPING_ROWS,
    **SERVING_ROWS,
    **SLOT_ROWS,
    "fleet": ResultRow(
        what="GPUs for 28 + 19 models shaped like Aegaeon's fleet: the least that keep up, one instance each, one"
        " invented rate, 200 s",
        arguments=("-m", "ops.bench.papers.aegaeon_fleet", "gpus", "--json"),
        values=_fleet,
        text="{before:.0f} -> {after:.0f} ({change:.0%})",
        against="paper, with redundancy for peaks: 1,192 -> 213 (-82 %)",
        drawn="seed 1, one draw",
    ),
    "beside": ResultRow(
        what="the benchmark of llm-d-batch-gateway in two of its ten cycles, simulated: first token p95 over alone, all"
        " 3,000 lines done",
        arguments=("-m", "ops.bench.queue.beside_interactive", "--simulated", "--json"),
        values=_beside,
        text="{moves:.2f}x; {minutes:.1f} min, {failed:.0f} failed",
        against="theirs with AIMD 1.30x; 12 min beside ten cycles",
        drawn="one draw of a fixed seed",
    ),
    "quantized": _quantized_row("1B", "{switch4:.2f}x"),
    "quantized-small": _quantized_row("300M", "**{switch4:.2f}x**"),
    "guesses": ResultRow(
        what="step times guessed from data sheets, over {sets_one:.0f} sets of times published for single GPUs,"
        " {sets_group:.0f} for two and four H800: factor, in the median and at worst",
        arguments=("-m", "ops.bench.engine.guessed_times", f"{DATA}/aegaeon/latency_profiles.csv.gz", "--json"),
        values=_guesses,
        text="prefill {prefill_one:.2f}, {prefill_one_most:.2f}; decode {decode_one:.2f}, {decode_one_most:.2f};"
        " two and four {prefill_group:.2f}, {prefill_group_most:.2f}; {decode_group:.2f}, {decode_group_most:.2f}",
        against="",
    ),
}
"""By name. Their commands take seconds to some minutes each."""
