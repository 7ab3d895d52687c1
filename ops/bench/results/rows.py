"""The rows of `ops/docs/results.md` that `make results` makes: a command, and what its answer says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

DATA = "{data}"
"""In arguments: the folder of the recordings."""


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """A line of the table.

    Attributes:
        what: what is measured, and under which assumptions; names of figures in braces, as in `text`.
        arguments: of `python`, for a command that prints JSON.
        values: the figures in its answer, by name.
        text: what the table says of them, with their names in braces.
        against: what it is compared with.
        tolerance: by how much of itself a figure may differ when the command runs again; 0 where nothing is timed.
    """

    what: str
    arguments: tuple[str, ...]
    values: Callable[[Any], Mapping[str, float]]
    text: str
    against: str
    tolerance: float = 0.0

    @property
    def command(self) -> str:
        """What a reader types."""
        return " ".join(("python", *self.arguments)).replace(f"{DATA}/", "DATA/")

    def said(self, values: Mapping[str, float]) -> str:
        """The text with its figures."""
        return self.text.format(**values)


_WORKLOADS = f"{DATA}/aegaeon/workloads.csv.gz"
_ONE_SIZE = ("models", _WORKLOADS, "--least", "94", "--most", "94", "--json", "--system")


def _attainments(answer: Any) -> dict[str, float]:
    (row,) = answer
    return {"service": row["service_attainment"], "tokens": row["token_attainment"]}


def _limits(answer: Any) -> dict[str, float]:
    (row,) = answer
    return {
        f"{metric}_{name}": value
        for metric in ("service", "token")
        for draws in [row[metric]["draws"]]
        for name, value in (("mean", row[metric]["mean"]), ("low", min(draws)), ("high", max(draws)))
    }


def _limits_row(system: str, what: str, against: str, tokens: str = "**{}**") -> ResultRow:
    """`tokens`: how that metric is shown: bold where the rival is better."""
    by_tokens = tokens.format("{token_mean:.1f} ({token_low:.0f} to {token_high:.0f})")
    return ResultRow(
        what=what,
        arguments=(
            "-m",
            "ops.bench.papers.aegaeon",
            "limits",
            _WORKLOADS,
            "--draws",
            "5",
            "--json",
            "--system",
            system,
        ),
        values=_limits,
        text=f"{{service_mean:.1f}} ({{service_low:.0f}} to {{service_high:.0f}}), {by_tokens}",
        against=against,
    )


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


def _guesses(answer: Any) -> dict[str, float]:
    def factors(key: str) -> list[float]:
        return [max(row[key], 1 / row[key]) for row in answer]

    prefill, decode = factors("prefill"), factors("decode")
    return {
        "models": len(answer),
        "prefill": median(prefill),
        "decode": median(decode),
        "prefill_most": max(prefill),
        "decode_most": max(decode),
    }


ROWS: Mapping[str, ResultRow] = {
    "limits-aggregated": _limits_row(
        "pooled-both",
        "models at 0.1 requests/s each that 16 GPUs serve with 90 % of service, of tokens in time; the Aegaeon"
        " artifact's assumptions, simulated, mean (range) of five draws: pool, aggregated",
        "paper 70, artifact 72, by service on one draw",
    ),
    "limits-disaggregated": _limits_row("pooled", "the same: pool, disaggregated", "as above"),
    "limits-rival": _limits_row(
        "request-level-prefetch",
        "the same: whole requests from one queue, the next model prefetched",
        "the strongest simple rival",
        tokens="{}",
    ),
    "pool-94": ResultRow(
        what="94 models on 16 GPUs at 0.1 requests/s each, the artifact's assumptions and draw, simulated: requests and"
        " tokens in time",
        arguments=("-m", "ops.bench.papers.aegaeon", *_ONE_SIZE, "pooled-both"),
        values=_attainments,
        text="aggregated pool {service:.1%}, **{tokens:.1%}**",
        against="the next row",
    ),
    "rival-94": ResultRow(
        what="the same, whole requests from one queue with the next model prefetched",
        arguments=("-m", "ops.bench.papers.aegaeon", *_ONE_SIZE, "request-level-prefetch"),
        values=_attainments,
        text="{service:.1%}, {tokens:.1%}",
        against="the row before",
    ),
    "fleet": ResultRow(
        what="GPUs for 28 + 19 models shaped like Aegaeon's fleet: the least that keep up, one instance each, one"
        " invented rate, 200 s",
        arguments=("-m", "ops.bench.papers.aegaeon_fleet", "gpus", "--json"),
        values=_fleet,
        text="{before:.0f} -> {after:.0f} ({change:.0%})",
        against="paper, with redundancy for peaks: 1,192 -> 213 (-82 %)",
    ),
    "beside": ResultRow(
        what="the benchmark of llm-d-batch-gateway in two of its ten cycles, simulated: first token p95 over alone, all"
        " 3,000 lines done",
        arguments=("-m", "ops.bench.queue.beside_interactive", "--simulated", "--json"),
        values=_beside,
        text="{moves:.2f}x; {minutes:.1f} min, {failed:.0f} failed",
        against="theirs with AIMD 1.30x; 12 min beside ten cycles",
    ),
    "quantized": ResultRow(
        what="a model in 4 bits (GPTQ) and in FP8 over itself in bfloat16, on CPU: a switch; the products of a layer"
        " on one token",
        arguments=("-m", "ops.bench.engine.quantized", "--model", "300M", "--rounds", "9", "--json"),
        values=_quantized,
        text="{switch4:.2f}x, {switch8:.2f}x; **{step4:.1f}x, {step8:.0f}x**",
        against="goal for the switch in 4 bits 0.35x",
        tolerance=0.5,
    ),
    "guesses": ResultRow(
        what="step times guessed from data sheets, over those published for {models:.0f} models on single GPUs:"
        " factor, in the median and at worst",
        arguments=("-m", "ops.bench.engine.guessed_times", f"{DATA}/aegaeon/latency_profiles.csv.gz", "--json"),
        values=_guesses,
        text="prefill {prefill:.2f}, {prefill_most:.2f}; decode {decode:.2f}, {decode_most:.2f}",
        against="",
    ),
}
"""By name. Their commands take seconds to some minutes each."""
