"""An hour of a public trace, as the schedule that AIPerf replays."""

import json
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from forecasts.importers.listings import Listing
from ops.simulator.traffic.traces import read_listing

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A file of requests, how many they are and the tokens of the longest."""

    path: Path
    requests: int
    tokens_max: int


def write_schedule(
    trace: Path, listing: Listing, path: Path, *, seconds: float, requests_max: int | None, context_tokens: int
) -> Schedule:
    """The first hour of a trace on a clock on which it takes `seconds`: evenly thinned to about `requests_max` requests
    (None: all), and without those beyond the context.

    Raises:
        DemandFileError: the trace cannot be read.
        ValueError: no request is left.
    """
    hour = list(takewhile(lambda each: each.time_s < HOUR_S, read_listing(trace, listing)))
    step = 1 if requests_max is None else max(1, -(-len(hour) // requests_max))
    kept = [each for each in hour[::step] if each.prompt_tokens + each.output_tokens <= context_tokens]
    kept = [each for each in kept if each.prompt_tokens and each.output_tokens]
    if not kept:
        raise ValueError(f"{trace} has no request of at most {context_tokens} tokens in its first hour")
    speed = seconds / HOUR_S
    lines = (
        {
            "timestamp": round(1e3 * each.time_s * speed, 3),
            "input_length": each.prompt_tokens,
            "output_length": each.output_tokens,
        }
        for each in kept
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    longest = max(each.prompt_tokens + each.output_tokens for each in kept)
    return Schedule(path=path, requests=len(kept), tokens_max=longest)
