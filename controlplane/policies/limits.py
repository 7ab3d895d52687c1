"""A tenant's limits: token buckets that refill evenly over a minute, and a number of requests at once.

Gateways share the counts in Redis, where a script applies the same rules (`store.redis.limits`); a test compares the
two. While Redis is unavailable, each gateway decides here, for its own share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from controlplane.policies.token_budgets import Budget

MINUTE_S = 60.0
RUNNING_RETRY_S = 1.0
"""Retry-After of a request refused for concurrency: when another one ends is unknown."""


class Limit(StrEnum):
    """The limit by which a request was refused."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    RUNNING = "concurrent"


@dataclass(frozen=True, kw_only=True)
class TenantLimits:
    """The limits of a tenant; None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_max: int | None = None
    queued_batch_tokens_max: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    tokens_total: int | None = None

    def budgets(self) -> dict[Budget, int]:
        """The budgets of tokens that there are."""
        tokens: dict[Budget, int | None] = {budget: getattr(self, budget.value) for budget in Budget}
        return {budget: most for budget, most in tokens.items() if most is not None}

    def meter_interactive(self) -> bool:
        """Whether interactive requests have a limit."""
        return bool(self.by_kind())

    def by_kind(self) -> dict[Limit, int]:
        """The limits of interactive requests that there are."""
        kinds = {
            Limit.REQUESTS: self.requests_per_minute,
            Limit.TOKENS: self.tokens_per_minute,
            Limit.RUNNING: self.concurrent_max,
        }
        return {kind: limit for kind, limit in kinds.items() if limit is not None}

    def with_shares(self, shares: Mapping[Limit, int]) -> "TenantLimits":
        """These limits with the shares of them in place of those that are shared; never more than the limits."""
        least = {kind: min(limit, shares.get(kind, limit)) for kind, limit in self.by_kind().items()}
        return replace(
            self,
            requests_per_minute=least.get(Limit.REQUESTS),
            tokens_per_minute=least.get(Limit.TOKENS),
            concurrent_max=least.get(Limit.RUNNING),
        )

    def share(self, gateways: int) -> "TenantLimits":
        """The even share of one of so many gateways, at least 1."""
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
    """What was left of a limit at `at_s`. Below zero: requests used more than estimated."""

    level: float
    at_s: float

    def refilled(self, limit: int, now_s: float) -> "Bucket":
        """The bucket at `now_s`: it fills to its limit within a minute."""
        gained = max(0.0, now_s - self.at_s) * limit / MINUTE_S
        return Bucket(level=min(float(limit), self.level + gained), at_s=now_s)

    def add(self, amount: float, limit: int) -> "Bucket":
        """Return an amount or, if negative, take it."""
        return replace(self, level=min(float(limit), self.level + amount))


@dataclass(frozen=True, kw_only=True)
class Usage:
    """A tenant's usage; None: a full bucket."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    running: int = 0


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Whether a request may run, and the usage after it. `refused`: the first limit that it exceeds."""

    refused: Limit | None
    usage: Usage


def choose_admission(usage: Usage, tokens: int, limits: TenantLimits, now_s: float) -> Admission:
    """Charge one request that may take `tokens`, or refuse it. The caller counts running requests."""
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
    """Seconds until the limit that refused a request admits it, if there are no others."""
    if refused == Limit.REQUESTS and usage.requests is not None and limits.requests_per_minute is not None:
        return (1 - usage.requests.level) * MINUTE_S / limits.requests_per_minute
    if refused == Limit.TOKENS and usage.tokens is not None and limits.tokens_per_minute is not None:
        return (tokens - usage.tokens.level) * MINUTE_S / limits.tokens_per_minute
    return RUNNING_RETRY_S


def until_full_s(bucket: Bucket, limit: int) -> float:
    """Seconds until the bucket is full."""
    return (limit - bucket.level) * MINUTE_S / limit


def _now(bucket: Bucket | None, limit: int | None, now_s: float) -> Bucket | None:
    if limit is None:
        return None
    return Bucket(level=float(limit), at_s=now_s) if bucket is None else bucket.refilled(limit, now_s)
