"""The runs of the benchmark: which load generator sends what to which server."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dataplane.protocol.tiers import Tier
from ops.bench.independent import aiperf, guidellm
from ops.bench.independent.aiperf import AIPERF
from ops.bench.independent.guidellm import GUIDELLM
from ops.bench.independent.schedule import Schedule
from ops.bench.independent.tools import Load, Tool

Kind = Literal["poisson", "flex", "cancelled", "limited", "trace", "sweep"]
KINDS: tuple[Kind, ...] = ("poisson", "flex", "cancelled", "limited", "trace", "sweep")
CANCELLED_PERCENT, CANCELLED_AFTER_S = 30, 0.1
LONGER = 4
"""Answers to requests that may be cancelled are so many times longer, so that none ends before."""
SWEEP_BENCHMARKS = 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a load generator, which takes about so many seconds once it sends. `bare`: its target is the server
    that does nothing but stream, and what it finds is the load generator's own time in the runs of the same `baseline`.
    `limited`: it sends with the key of a tenant that may send less.
    """

    name: str
    tool: Tool
    load: Load
    options: tuple[str, ...]
    seconds: float
    baseline: str
    tier: Tier = Tier.IW_N
    bare: bool = False
    limited: bool = False


def runs(
    kinds: Sequence[Kind],
    load: Load,
    *,
    rates: Sequence[float],
    seconds: float,
    schedule: tuple[Schedule, float] | None,
) -> list[Run]:
    """All runs of some kinds, each after the bare run of its baseline. `rates` are in requests a second, the middle one
    is that of all but `poisson`; `schedule` comes with the seconds it takes.
    """
    middle = sorted(rates)[len(rates) // 2]
    found: list[Run] = []
    for kind in kinds:
        if kind == "poisson":
            found += [_poisson(load, rate, seconds) for rate in rates]
        elif kind == "flex":
            run = _poisson(load, middle, seconds, service_tier="flex")
            found.append(replace(run, name="flex", tier=Tier.NIW))
        elif kind == "cancelled":
            found.append(_cancelled(load, middle, seconds))
        elif kind == "limited":
            found.append(replace(_poisson(load, middle, seconds), name="limited", limited=True))
        elif kind == "trace" and schedule is not None:
            found += _with_bare(_trace(load, *schedule))
        elif kind == "sweep":
            found += _sweep(load, middle, seconds)
    if any(run.baseline == "poisson" for run in found):
        return [_bare(_poisson(load, middle, seconds)), *found]
    return found


def _bare(run: Run) -> Run:
    return replace(run, name=f"bare server, {run.name}", bare=True)


def _with_bare(run: Run) -> list[Run]:
    return [_bare(run), run]


def _poisson(load: Load, per_s: float, seconds: float, **fields: str) -> Run:
    options = aiperf.poisson(load, per_s=per_s, requests=_requests(per_s, seconds))
    options += aiperf.inputs(ignore_eos="true", **fields)
    name = f"poisson {per_s:g}/s"
    return Run(name=name, tool=AIPERF, load=load, options=options, seconds=seconds, baseline="poisson")


def _cancelled(load: Load, per_s: float, seconds: float) -> Run:
    run = _poisson(replace(load, output_tokens=LONGER * load.output_tokens), per_s, seconds)
    cancelling = (
        "--request-cancellation-rate", str(CANCELLED_PERCENT), "--request-cancellation-delay", str(CANCELLED_AFTER_S),
    )  # fmt: skip
    return replace(run, name="cancelled", options=(*run.options, *cancelling))


def _trace(load: Load, file: Schedule, seconds: float) -> Run:
    options = (*aiperf.fixed_schedule(file.path), *aiperf.inputs(ignore_eos="true"))
    name = f"trace of {file.requests}"
    return Run(name=name, tool=AIPERF, load=load, options=options, seconds=seconds, baseline="trace")


def _sweep(load: Load, per_s: float, seconds: float) -> list[Run]:
    requests = _requests(per_s, seconds)
    options = guidellm.sweep(benchmarks=SWEEP_BENCHMARKS, requests=requests)
    swept_s = SWEEP_BENCHMARKS * seconds
    swept = Run(name="sweep", tool=GUIDELLM, load=load, options=options, seconds=swept_s, baseline="sweep")
    one_rate = guidellm.poisson(per_s=per_s, requests=requests)
    return [replace(_bare(swept), name="bare server", options=one_rate, seconds=seconds), swept]


def _requests(per_s: float, seconds: float) -> int:
    return max(2, round(per_s * seconds))
