"""A tenant's limits: token buckets that refill evenly over a minute, and a number of requests at once.

Gateways share the counts in Redis, where a script decides (`store.limits`); its rules are these, and a test compares
the two. While Redis is away each gateway decides here, for its own share.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

MINUTE_S = 60.0
RUNNING_RETRY_S = 1.0
"""When a request refused for too many at once should come back; nobody knows when one of them ends."""


class Limit(StrEnum):
    """What a request was refused for."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    RUNNING = "concurrent"


@dataclass(frozen=True, kw_only=True)
class TenantLimits:
    """What a tenant may use; None: without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_max: int | None = None
    queued_batch_tokens_max: int | None = None

    def meter_interactive(self) -> bool:
        """Whether interactive requests must be counted at all."""
        return any(
            limit is not None for limit in (self.requests_per_minute, self.tokens_per_minute, self.concurrent_max)
        )

    def share(self, gateways: int) -> "TenantLimits":
        """What one of so many gateways may admit by itself: an even part, and never nothing."""
        return replace(
            self,
            requests_per_minute=_part(self.requests_per_minute, gateways),
            tokens_per_minute=_part(self.tokens_per_minute, gateways),
            concurrent_max=_part(self.concurrent_max, gateways),
        )


def _part(limit: int | None, gateways: int) -> int | None:
    return None if limit is None else max(1, limit // gateways)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """What was left of a limit at a time. Below zero: more was used than was guessed."""

    level: float
    at_s: float

    def refilled(self, limit: int, now_s: float) -> "Bucket":
        """The bucket now: it fills up within a minute, and never over its limit."""
        gained = max(0.0, now_s - self.at_s) * limit / MINUTE_S
        return Bucket(level=min(float(limit), self.level + gained), at_s=now_s)

    def add(self, amount: float, limit: int) -> "Bucket":
        """Put something back, or (below zero) take more."""
        return replace(self, level=min(float(limit), self.level + amount))


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a tenant used; a bucket not seen before is full."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    running: int = 0


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Whether a request may run, and the usage after that. `refused`: the first limit that it met."""

    refused: Limit | None
    usage: Usage


def choose_admission(usage: Usage, tokens: int, limits: TenantLimits, now_s: float) -> Admission:
    """Charge one request that may take `tokens`, all of it or (refused) nothing. The caller counts what runs."""
    requests = _now(usage.requests, limits.requests_per_minute, now_s)
    left = _now(usage.tokens, limits.tokens_per_minute, now_s)
    refused: Limit | None = None
    if requests is not None and requests.level < 1:
        refused = Limit.REQUESTS
    elif left is not None and left.level < tokens:
        refused = Limit.TOKENS
    elif limits.concurrent_max is not None and usage.running >= limits.concurrent_max:
        refused = Limit.RUNNING
    elif requests is not None and limits.requests_per_minute is not None:
        requests = requests.add(-1, limits.requests_per_minute)
    if refused is None and left is not None and limits.tokens_per_minute is not None:
        left = left.add(-tokens, limits.tokens_per_minute)
    return Admission(refused=refused, usage=Usage(requests=requests, tokens=left, running=usage.running))


def retry_after_s(refused: Limit, usage: Usage, tokens: int, limits: TenantLimits) -> float:
    """Seconds until the limit that refused a request lets it through, if nobody else comes."""
    if refused == Limit.REQUESTS and usage.requests is not None and limits.requests_per_minute is not None:
        return (1 - usage.requests.level) * MINUTE_S / limits.requests_per_minute
    if refused == Limit.TOKENS and usage.tokens is not None and limits.tokens_per_minute is not None:
        return (tokens - usage.tokens.level) * MINUTE_S / limits.tokens_per_minute
    return RUNNING_RETRY_S


def until_full_s(bucket: Bucket, limit: int) -> float:
    """Seconds until the whole limit is there again."""
    return (limit - bucket.level) * MINUTE_S / limit


def _now(bucket: Bucket | None, limit: int | None, now_s: float) -> Bucket | None:
    if limit is None:
        return None
    return Bucket(level=float(limit), at_s=now_s) if bucket is None else bucket.refilled(limit, now_s)
