"""Rows of results on Aegaeon's workloads: see `ops.bench.papers.aegaeon`."""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from ops.bench.results.row import DATA, ResultRow

_COMMAND = ("-m", "ops.bench.papers.aegaeon")
_WORKLOADS = f"{DATA}/aegaeon/workloads.csv.gz"
_METRICS = ("service", "token")
_RIVAL = "request-level-prefetch"
_DEADLINES = "pooled-both-deadlines"
_NONE: Mapping[str, int] = {}
_SYSTEMS = {
    "pooled-both": "pool, aggregated, in rounds",
    _DEADLINES: "pool, aggregated, time slices by deadlines",
    "pooled": "pool, disaggregated, 6 + 10 GPUs, in rounds",
    "pooled-deadlines": "pool, disaggregated, 6 + 10 GPUs, time slices by deadlines",
    _RIVAL: "whole requests from one queue, the next model prefetched",
}


def _limits(answer: Any) -> dict[str, float]:
    """The mean, least and most of a setup's limits by each metric."""
    (row,) = answer
    return {
        f"{metric}_{name}": value
        for metric in _METRICS
        for draws in [row[metric]["draws"]]
        for name, value in (("mean", row[metric]["mean"]), ("low", min(draws)), ("high", max(draws)))
    }


def _ranges(worse: str) -> str:
    """Service and tokens, each as mean and range; those named in `worse` in bold."""
    texts = (f"{{{metric}_mean:.1f}} ({{{metric}_low:.0f}} to {{{metric}_high:.0f}})" for metric in _METRICS)
    return ", ".join(f"**{text}**" if metric in worse else text for metric, text in zip(_METRICS, texts, strict=True))


def _limits_rows(
    key: str,
    what: str,
    against: str,
    options: tuple[str, ...],
    worse: Mapping[str, str],
    *,
    draws: int = 5,
    drawn: str = "",
    reached: Mapping[str, int] = _NONE,
) -> dict[str, ResultRow]:
    """A row for each system in `worse`, which says by which metrics it loses. `drawn`: if there is more to say of the
    draws. `reached`: systems that keep as many models as were tried, and how many these are.
    """
    return {
        f"{key}-{system}": ResultRow(
            what=(f"{what}: " if place == 0 else "the same: ")
            + _SYSTEMS[system]
            + (f", of at most {reached[system]} that were tried" if system in reached else ""),
            arguments=(*_COMMAND, "limits", _WORKLOADS, "--draws", f"{draws}", "--json", *options, "--system", system),
            values=_limits,
            text=_ranges(losses),
            against="the strongest simple rival" if system == _RIVAL else against if place == 0 else "as above",
            drawn=drawn or f"draws 1 to {draws}, range of them",
        )
        for place, (system, losses) in enumerate(worse.items())
    }


_BOTH = "service token"
_LIMITS = {
    **_limits_rows(
        "limits",
        "models at 0.1 requests/s each that 16 GPUs serve with 90 % of service, of tokens in time; the Aegaeon"
        " artifact's assumptions, simulated",
        "paper 70, artifact 72, by service on one draw",
        (),
        {"pooled-both": "token", "pooled": _BOTH, "pooled-deadlines": "token", _RIVAL: ""},
    ),
    **_limits_rows(
        "deadlines",
        "the same, without a limit of host memory, which 2 TB a node would be beyond 111 models",
        "the strongest simple rival above",
        ("--least", "100", "--most", "220"),
        {_DEADLINES: ""},
    ),
    **_limits_rows(
        "half-objectives",
        "the same with 0.5 times the objectives (Figure 13)",
        "the next row",
        ("--slo-scale", "0.5", "--least", "60", "--most", "140"),
        {_DEADLINES: "", _RIVAL: ""},
    ),
    **_limits_rows(
        "third-objectives",
        "the same with 0.3 times the objectives (Figure 13)",
        "the next row",
        ("--slo-scale", "0.3", "--least", "50", "--most", "110"),
        {_DEADLINES: "", _RIVAL: ""},
    ),
    **_limits_rows(
        "half-a-request",
        "the same at 0.5 requests/s each (Figure 11b)",
        "paper: 2.5 times as many as request-level switching",
        ("--rate", "0.5", "--least", "4", "--most", "80"),
        {"pooled-both": "", "pooled": "", _RIVAL: "", _DEADLINES: ""},
        reached={_DEADLINES: 80},
    ),
    **_limits_rows(
        "long-inputs",
        "the same at 0.1 requests/s each, prompts twice as long (Figure 12)",
        "paper: a slight drop for all",
        ("--scale-inputs", "2", "--least", "8"),
        {"pooled-both": "token", "pooled": _BOTH, _RIVAL: "", _DEADLINES: ""},
        drawn="draws 1 to 5, range of them; in 3 and 5 a prompt of model 95, of model 39 is beyond every context, so no"
        " system keeps more than 94, 38",
        reached={_DEADLINES: 160},
    ),
    **_limits_rows(
        "long-outputs",
        "the same at 0.1 requests/s each, answers twice as long (Figure 12)",
        "paper: up to 2.5 times as many as request-level switching",
        ("--scale-outputs", "2", "--least", "8"),
        {"pooled-both": "", "pooled": "", _RIVAL: "", _DEADLINES: ""},
        reached={_DEADLINES: 160},
    ),
}

_NODES = _limits_rows(
    "two-nodes",
    "models at 0.1 requests/s each on two nodes of 8 GPUs and 2 TB of host memory, each model on one of them",
    "the first, second and fourth row of this table: one node, and the rival with one queue for both nodes",
    ("--nodes", "2"),
    {"pooled-both": "token", "pooled": _BOTH},
    draws=3,
) | _limits_rows(
    "two-nodes-deadlines",
    "the same",
    "the fifth row of this table: one node without a limit of host memory",
    ("--nodes", "2", "--least", "80", "--most", "220"),
    {_DEADLINES: ""},
    draws=3,
)
_STAGES = ("prefill waiting", "prefill", "KV transfer", "decode", "decode waiting")
_STATES = ("prefill", "decode", "weights", "kv", "idle")


def _times(answer: Any) -> dict[str, float]:
    (row,) = answer
    shares = {f"request_{stage.replace(' ', '_')}": row["requests"][stage]["mean"] for stage in _STAGES}
    shares |= {f"slot_{state}": row["slots"][state]["mean"] for state in _STATES}
    sizes = {
        f"switch_{size}_{name}": times[name]
        for size, times in row["switches"].items()
        for name in ("hidden", "in_a_second")
    }
    slowest = max(times["quantiles"]["1"] for times in row["switches"].values())
    kv = row["kv"]
    return shares | sizes | {"switch_most": slowest, "kv_p99": kv["quantiles"]["0.99"], "kv_most": kv["quantiles"]["1"]}


def _times_row(system: str, what: str) -> ResultRow:
    requests = ", ".join(f"{{request_{stage.replace(' ', '_')}:.1%}}" for stage in _STAGES)
    slots = ", ".join(f"{{slot_{state}:.1%}}" for state in _STATES)
    sizes = ("7B", "9B", "13B")
    hidden, within = (
        ", ".join(f"{{switch_{size}_{name}:.0%}}" for size in sizes) for name in ("hidden", "in_a_second")
    )
    return ResultRow(
        what=what,
        arguments=(
            *(*_COMMAND, "where-time-goes", _WORKLOADS),
            *("--models", "70", "--draws", "3", "--json", "--system", system),
        ),
        values=_times,
        text=f"requests {requests}; slots {slots}; switches within 10 ms {hidden}, **within 1 s {within}**, at most"
        " {switch_most:.1f} s; a request's KV at most {kv_most:.2f} s, p99 {kv_p99:.2f} s",
        against="paper: about half of the switches near-instantaneous, all within 1 s; KV within 1 s",
        drawn="draws 1 to 3, all together",
    )


_TIMES = {
    "times-pooled": _times_row(
        "pooled",
        "where time goes with 70 models at 0.1 requests/s each (Figures 14, 15): shares of requests' time (prefill"
        " waiting, prefill, KV transfer, decode, decode waiting) and of slots' (prefill, decode, waiting for weights,"
        " for KV, idle), switches by size (7B, 9B, 13B), KV transfers; pool, disaggregated, in rounds",
    ),
    "times-pooled-both": _times_row("pooled-both", "the same: pool, aggregated, in rounds"),
}


def _attainments(answer: Any) -> dict[str, float]:
    (row,) = answer
    return {"service": row["service_attainment"], "tokens": row["token_attainment"]}


_RATES = ("0.3", "0.5", "0.7")
_BUSY_WHAT = f"40 models at {', '.join(_RATES)} requests/s each: service in time; tokens in time"


def _by_rate(answer: Any) -> dict[str, float]:
    """Service and tokens in time at each rate, means of the draws."""
    return {
        f"{metric}_{place}": mean(row[f"{metric}_attainment"] for row in answer if row["rate"] == rate)
        for metric in _METRICS
        for place, rate in enumerate(_RATES)
    }


def _busy_rows(systems: Mapping[str, str]) -> dict[str, ResultRow]:
    """A row for each system, with the metrics by which it loses."""

    def texts(metric: str) -> str:
        return ", ".join(f"{{{metric}_{place}:.1%}}" for place in range(len(_RATES)))

    return {
        f"busy-{system}": ResultRow(
            what=(f"{_BUSY_WHAT}: " if place == 0 else "the same: ") + _SYSTEMS[system],
            arguments=(
                *(*_COMMAND, "rates", _WORKLOADS, "--draws", "3", "--json", "--system", system),
                *(option for rate in _RATES for option in ("--rate", rate)),
            ),
            values=_by_rate,
            text="; ".join(f"**{texts(one)}**" if one in losses else texts(one) for one in _METRICS),
            against="the strongest simple rival" if system == _RIVAL else "the rival below",
            drawn="draws 1 to 3, means",
        )
        for place, (system, losses) in enumerate(systems.items())
    }


_BUSY = _busy_rows({_DEADLINES: "", "pooled-both": "", "pooled": "", _RIVAL: ""})


def _one_size(system: str, what: str, text: str, against: str) -> ResultRow:
    return ResultRow(
        what=what,
        arguments=(*_COMMAND, "models", _WORKLOADS, "--least", "94", "--most", "94", "--json", "--system", system),
        values=_attainments,
        text=text,
        against=against,
        drawn="the artifact's own draw",
    )


AEGAEON_ROWS: Mapping[str, ResultRow] = {
    **_LIMITS,
    **_NODES,
    **_BUSY,
    **_TIMES,
    "pool-94": _one_size(
        "pooled-both",
        "94 models on 16 GPUs at 0.1 requests/s each, the artifact's assumptions and draw, simulated: requests and"
        " tokens in time",
        "aggregated pool, in rounds {service:.1%}, **{tokens:.1%}**",
        "the next row",
    ),
    "rival-94": _one_size(
        _RIVAL,
        "the same, whole requests from one queue with the next model prefetched",
        "{service:.1%}, {tokens:.1%}",
        "the row before",
    ),
}
"""By name. Their commands take seconds to some minutes each."""
