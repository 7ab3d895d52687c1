"""Streams that faults broke, and streams that a second gateway saved.

A client retries at another gateway if a request fails before the first byte of its answer. A stream whose gateway is
lost later breaks, however many gateways there are, because its connection is lost.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ops.faults.load import Streamed

BEFORE_S = 15.0
"""A fault that ended at most so long before a stream began may be the cause of its end: the recovery time."""


@dataclass(frozen=True, kw_only=True)
class FaultTimes:
    """A fault as the report names it, and its times on the clock of the streams."""

    what: str
    began_s: float
    ended_s: float


def kind_of_process(victim: str) -> str:
    """The kind of a victim: `api` of `api-2`, `agent>api` of `agent-east-1>api`."""
    return ">".join(end.partition("-")[0] for end in victim.split(">"))


def stream_losses(streams: Iterable[Streamed], faults: Sequence[FaultTimes]) -> dict[str, Any]:
    """Streams that did not end well, by the latest fault before their end and how they ended; and those saved by asking
    another gateway.
    """
    by_fault: Counter[str] = Counter()
    saved = 0
    for stream in streams:
        if stream.outcome == "whole":
            saved += stream.attempts > 1
            continue
        near = [one for one in faults if one.began_s <= stream.ended_s and one.ended_s >= stream.started_s - BEFORE_S]
        cause = max(near, key=lambda one: one.began_s).what if near else "no fault near"
        by_fault[f"{cause}: {stream.outcome}"] += 1
    return {"lost_by_fault": dict(by_fault.most_common()), "saved_by_another_gateway": saved}
