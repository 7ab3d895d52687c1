"""GuideLLM of the vLLM project: its options, and what it reports of each request."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench.independent.counts import Counts
from ops.bench.independent.tools import LOG, Load, Phase, Target, Tool, ToolError

_REPORT = "report.json"


def arguments(target: Target, load: Load, more: Sequence[str], folder: Path) -> list[str]:
    """A run of streamed chats; `more` names its profile and its end."""
    lengths = f"prompt_tokens={load.input_tokens},output_tokens={load.output_tokens}"
    return [
        "run", "--backend", f"kind=openai_http,target={target.url},model={target.model},api_key={target.key}",
        "--tokenizer", f"kind=hf_auto,model={target.tokenizer}", "--data", f"kind=synthetic_text,{lengths}",
        "--seed", f"kind=static,value={load.seed}",
        "--output", f"kind=json,path={folder / _REPORT}", "--disable-console", *more,
    ]  # fmt: skip


def sweep(*, benchmarks: int, requests: int) -> tuple[str, ...]:
    """One request at a time, all at once, and constant rates between what these two reached."""
    return ("--profile", f"kind=sweep,sweep_size={benchmarks}", *_end(requests))


def poisson(*, per_s: float, requests: int) -> tuple[str, ...]:
    """Poisson arrivals."""
    return ("--profile", f"kind=poisson,rate={per_s:g}", *_end(requests))


def _end(requests: int) -> tuple[str, ...]:
    """A time limit would cancel what is in flight, so the end is a number of requests."""
    return ("--constraint", f"kind=max_requests,count={requests}")


def read(folder: Path) -> list[Phase]:
    """What it saw of each benchmark. It reports a server's usage as tokens, so the words of each answer, which are the
    tokens of this model, are counted here; a remark is made where they differ.

    Raises:
        ToolError: there is no report that can be read.
    """
    try:
        benchmarks = json.loads((folder / _REPORT).read_text())["benchmarks"]
    except (OSError, ValueError, KeyError) as error:
        raise ToolError(f"GuideLLM wrote no report, {folder / LOG} says why: {error}") from error
    rates = [benchmark["config"]["strategy"].get("rate") or 0.0 for benchmark in benchmarks]
    return [
        _phase(benchmark, saturated=len(rates) > 1 and rate == max(rates))
        for benchmark, rate in zip(benchmarks, rates, strict=True)
    ]


def _phase(benchmark: Mapping[str, Any], *, saturated: bool) -> Phase:
    """`saturated`: at the rate that was reached with all requests sent at once. On a busy machine the last request of a
    benchmark may stay in flight for its scheduler, and is then not reported.
    """
    strategy, requests = benchmark["config"]["strategy"], benchmark["requests"]
    whole = requests["successful"] or []
    unlike = sum(
        (each["prompt_tokens"], each["output_tokens"])
        != (each["input_metrics"]["text_words"], each["output_metrics"]["text_words"])
        for each in whole
    )
    seen = _seen(requests, whole)
    rate = f" {strategy['rate']:.1f}/s" if strategy.get("rate") else ""
    return Phase(
        name=f"{strategy['type_']}{rate}",
        began_s=benchmark["start_time"],
        seen=seen,
        unreported=benchmark["scheduler_state"]["created_requests"] - seen.answered - seen.errors,
        saturated=saturated or strategy["type_"] == "throughput",
        remarks=(f"{unlike} answers whose usage is not the words they have",) if unlike else (),
    )


def _seen(requests: Mapping[str, Sequence[Any] | None], whole: Sequence[Mapping[str, Any]]) -> Counts:
    first = [each["time_to_first_token_ms"] / 1e3 for each in whole if each["time_to_first_token_ms"] is not None]
    paced = [each["inter_token_latency_ms"] / 1e3 for each in whole if each["inter_token_latency_ms"] is not None]
    return Counts(
        answered=len(whole),
        errors=len(requests["errored"] or ()) + len(requests["incomplete"] or ()),
        input_tokens=sum(each["input_metrics"]["text_words"] for each in whole),
        output_tokens=sum(each["output_metrics"]["text_words"] for each in whole),
        first_tokens=len(first),
        ttft_sum_s=sum(first),
        paced=len(paced),
        itl_sum_s=sum(paced),
    )


# Each of its workers loads torch, before every benchmark of a sweep: one is enough.
GUIDELLM = Tool(name="guidellm", environment={"GUIDELLM__MAX_WORKER_PROCESSES": "1"}, arguments=arguments, read=read)
