"""AIPerf of NVIDIA: its options, and what it exports of each request."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench.independent.counts import Counts
from ops.bench.independent.tools import LOG, Load, Phase, Target, Tool, ToolError

_EXPORT = "profile_export.jsonl"
_QUIET = ("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "2")


def arguments(target: Target, load: Load, more: Sequence[str], folder: Path) -> list[str]:
    """A run of streamed chats. It counts tokens with the target's own tokenizer, and `more` says when it sends what."""
    return [
        "profile", "--model", target.model, "--url", target.url, "--api-key", target.key,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", str(target.tokenizer),
        "--random-seed", str(load.seed), "--output-artifact-dir", str(folder), *_QUIET, *more,
    ]  # fmt: skip


def poisson(load: Load, *, per_s: float, requests: int) -> tuple[str, ...]:
    """Poisson arrivals of requests of one length."""
    return (
        "--request-rate", f"{per_s:g}", "--arrival-pattern", "poisson", "--request-count", str(requests),
        "--isl", str(load.input_tokens), "--osl", str(load.output_tokens),
    )  # fmt: skip


def fixed_schedule(trace: Path) -> tuple[str, ...]:
    """The arrivals and lengths of a trace."""
    return ("--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule")


def inputs(**fields: str) -> tuple[str, ...]:
    """More fields of every request."""
    return ("--extra-inputs", *(f"{name}:{value}" for name, value in fields.items()))


def records(folder: Path) -> list[dict[str, Any]]:
    """What it exported of each request.

    Raises:
        ToolError: it exported nothing that can be read.
    """
    try:
        found = [json.loads(line) for line in (folder / _EXPORT).read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ToolError(f"AIPerf exported no records, {folder / LOG} says why: {error}") from error
    if not found:
        raise ToolError(f"AIPerf sent nothing, {folder / LOG} says why")
    return found


def read(folder: Path) -> list[Phase]:
    """What it saw, as one phase. It makes a remark of answers whose usage its own tokenizer does not confirm.

    Raises:
        ToolError: it exported nothing that can be read.
    """
    exported = records(folder)
    whole = [record["metrics"] for record in exported if record.get("error") is None]
    pairs = (("input_sequence_length", "usage_prompt_tokens"), ("output_sequence_length", "usage_completion_tokens"))
    unlike = sum(any(value_of(each, own) != value_of(each, usage) for own, usage in pairs) for each in whole)
    return [
        Phase(
            name="",
            began_s=min(record["metadata"]["request_start_ns"] for record in exported) / 1e9,
            seen=_seen(exported, whole),
            remarks=(f"{unlike} answers whose usage is not what AIPerf counts",) if unlike else (),
        )
    ]


def _seen(exported: Sequence[Mapping[str, Any]], whole: Sequence[Mapping[str, Any]]) -> Counts:
    first = [value_of(each, "time_to_first_token") / 1e3 for each in whole if "time_to_first_token" in each]
    paced = [value_of(each, "inter_token_latency") / 1e3 for each in whole if "inter_token_latency" in each]
    return Counts(
        answered=len(whole),
        errors=len(exported) - len(whole),
        input_tokens=int(sum(value_of(each, "input_sequence_length") for each in whole)),
        output_tokens=int(sum(value_of(each, "output_sequence_length") for each in whole)),
        first_tokens=len(first),
        ttft_sum_s=sum(first),
        paced=len(paced),
        itl_sum_s=sum(paced),
    )


def value_of(metrics: Mapping[str, Any], name: str) -> float:
    """A metric of one request: milliseconds, or tokens. 0: it has none."""
    return float(metrics[name]["value"]) if name in metrics else 0.0


AIPERF = Tool(name="aiperf", environment={}, arguments=arguments, read=read)
