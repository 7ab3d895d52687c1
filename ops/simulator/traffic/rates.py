"""Requests from recordings of rates: of each bucket of time, whatever was sent in it.

So many requests come in a bucket as were counted (times the scale, rounded at random), or a Poisson number around what
is expected. Their intervals are drawn and stretched to fill the bucket: exponential ones make a Poisson process of
that number; ServeGen's clients have the gamma or Weibull intervals that were fitted to them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.protocol.tiers import Tier
from forecasts.importers.lines import CsvFile, DemandFileError
from forecasts.importers.rates import (
    AZURE_BUCKET_S,
    DEMAND,
    azure_counts,
    demand_row,
    sageserve_rows,
)
from forecasts.importers.settings import MINUTE_S, ImportSettings
from ops.simulator.kernel.requests import Request
from ops.simulator.traffic.senders import Names, Sender, alike
from ops.simulator.traffic.traffic_parts import IntArray, RatesPart, RecordedPart

REQUESTS_MAX = 1e7
"""Of one sender in one bucket: they are drawn at once."""
_CHUNK = 4096
_ROUNDING_S = 1e-6


class Drawn(Protocol):
    """Token counts that can be drawn."""

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """So many of them."""


class Intervals(NamedTuple):
    """How requests of a bucket follow each other, but for the rate: the shape of a gamma or Weibull distribution."""

    pattern: Literal["Gamma", "Weibull"] = "Gamma"
    shape: float = 1.0


POISSON = Intervals()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What one sender sends in a bucket. `counted`: so many were counted; else so many are expected."""

    sender: Sender
    requests: float
    prompt: Drawn
    output: Drawn
    counted: bool = False
    intervals: Intervals = POISSON


Bucket = tuple[float, float, Sequence[Flow]]
"""When it begins after the recording's time 0, how long it lasts, and what is sent in it."""


@dataclass(frozen=True, kw_only=True)
class Open:
    """What a file leaves open: its table of the scenario, who sends, and the scenario's names of its models."""

    part: RatesPart
    sender: Sender
    names: Names


def checked(buckets: Iterable[Bucket], path: Path, scale: float) -> Iterator[Bucket]:
    """The buckets of a file, if they come in order, none before another's end, each with no more than can be drawn.

    Raises:
        DemandFileError: they do not.
    """
    over_s = 0.0
    for start_s, width_s, flows in buckets:
        if start_s < over_s - _ROUNDING_S:
            raise DemandFileError(f"{path}: {start_s:.10g} s after its time 0 lies before {over_s:.10g} s above")
        most = scale * max((flow.requests for flow in flows), default=0.0)
        if most > REQUESTS_MAX:
            about = f"{most:.3g} requests in the {width_s:.10g} s from {start_s:.10g} s on"
            raise DemandFileError(f"{path}: {about}: at most {REQUESTS_MAX:.0e} are drawn")
        begin_s = max(start_s, over_s)
        over_s = begin_s + width_s
        yield begin_s, width_s, flows


def draw(buckets: Iterable[Bucket], part: RecordedPart, seed: int) -> Iterator[Request]:
    """The requests of buckets, which come in order and do not overlap."""
    rng = np.random.default_rng(seed)
    number = 0
    for start_s, width_s, flows in buckets:
        if start_s >= part.ends_s:
            return
        if start_s + width_s <= part.from_s:
            continue
        drawn = [_drawn(flow, start_s, width_s, part.scale, rng) for flow in flows]
        if not drawn:
            continue
        columns = [np.concatenate(column) for column in zip(*drawn, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        order = order[(columns[0][order] >= part.from_s) & (columns[0][order] < part.ends_s)]
        for first in range(0, len(order), _CHUNK):
            places = order[first : first + _CHUNK]
            for row in zip(*(column[places].tolist() for column in columns), strict=True):
                time_s, model, origin, tier, prompt_tokens, output_tokens = row
                yield Request(
                    number=number,
                    arrived_s=time_s - part.from_s,
                    model=model,
                    origin=origin,
                    tier=tier,
                    prompt_tokens=prompt_tokens,
                    output_tokens=output_tokens,
                )
                number += 1


def _drawn(
    flow: Flow, start_s: float, width_s: float, scale: float, rng: np.random.Generator
) -> tuple[npt.NDArray[np.generic], ...]:
    """Times, models, origins, tiers, prompt and output tokens of a flow's requests."""
    expected = flow.requests * scale
    count = int(expected + rng.random()) if flow.counted else int(rng.poisson(expected))
    pattern, shape = flow.intervals
    intervals = rng.gamma(shape, size=count + 1) if pattern == "Gamma" else rng.weibull(shape, count + 1)
    passed = np.cumsum(intervals)
    times_s = start_s + width_s * (passed[:-1] / passed[-1] if 0 < passed[-1] < np.inf else np.sort(rng.random(count)))
    return times_s, *flow.sender.draw(rng, count), flow.prompt.draw(rng, count), flow.output.draw(rng, count)


def azure_buckets(file: CsvFile, given: Open) -> Iterator[Bucket]:
    """Azure's requests per 10 s; time 0 is that of the first line."""
    zero_s: float | None = None
    for time_s, count in azure_counts(file):
        zero_s = time_s if zero_s is None else zero_s
        yield time_s - zero_s, AZURE_BUCKET_S, (flow_of(given, given.sender, count or 0.0, counted=True),)


def sageserve_buckets(file: CsvFile, given: Open) -> Iterator[Bucket]:
    """SageServe's prompt tokens per minute: Poisson requests, whose prompts have the given mean. "dev" is NIW."""
    deferred = Sender(models=given.sender.models, origins=given.sender.origins, tiers={Tier.NIW: 1.0})
    minutes: defaultdict[float, list[Flow]] = defaultdict(list)
    for workload, row in sageserve_rows(file, ImportSettings(start_s=0.0)):
        sender = given.sender if workload == "prod" else deferred
        flow = flow_of_tokens(given, sender, row.model, (row.tokens_per_s or 0.0) * MINUTE_S)
        minutes[row.start_s].append(flow)
    for start_s in sorted(minutes):
        yield start_s, MINUTE_S, minutes.pop(start_s)


def csv_buckets(file: CsvFile, given: Open) -> Iterator[Bucket]:
    """Input tokens per second by region and model, as `forecast import` and `simulate --from-live` write them.

    Time 0 is the first row's; a bucket is as long as the least time between two rows. A column `tier`, where there is
    one and it is not empty, says of which tier all requests of a row are. Requests come from the region of their row
    where that is one of the traffic's origins (by default the scenario's regions); else, as for "all", from the
    origins by their shares.
    """
    tiered = "tier" in file.header
    rows: defaultdict[float, list[tuple[Sender, str, float]]] = defaultdict(list)
    for line in file.lines((*DEMAND, "tier") if tiered else DEMAND):
        row = demand_row(line)
        if tiered and line.text("tier") not in {"IW-F", "IW-N", "NIW", ""}:
            raise line.error("tier", f"must be IW-F, IW-N, NIW or empty, is {line.text('tier')[:20]!r}")
        tier = line.text("tier") if tiered else ""
        origins = {row.region: 1.0} if row.region in given.sender.origins else given.sender.origins
        tiers = {tier: 1.0} if tier else given.sender.tiers
        sender = Sender(models=given.sender.models, origins=origins, tiers=tiers)  # type: ignore[arg-type]
        rows[row.start_s].append((sender, row.model, row.tokens_per_s or 0.0))
    starts_s = sorted(rows)
    width_s = min((later - sooner for sooner, later in pairwise(starts_s)), default=MINUTE_S)
    for start_s in starts_s:
        flows = [flow_of_tokens(given, sender, model, rate * width_s) for sender, model, rate in rows.pop(start_s)]
        yield start_s - starts_s[0], width_s, flows


def flow_of_tokens(given: Open, sender: Sender, model: str, tokens: float) -> Flow:
    """So many prompt tokens for a recorded model, as Poisson requests of the mean length."""
    named = replace(sender, models=alike([given.names(model)]))
    return flow_of(given, named, tokens / given.part.prompt_tokens.cut_mean)


def flow_of(given: Open, sender: Sender, requests: float, *, counted: bool = False) -> Flow:
    """So many requests with the lengths of the scenario."""
    part = given.part
    return Flow(sender=sender, requests=requests, prompt=part.prompt_tokens, output=part.output_tokens, counted=counted)
