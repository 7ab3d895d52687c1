"""Attainment of latency objectives: the share of tokens (or time) in time, and the expected active models. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServedRequest:
    """A request that has ended. `token_times_s`: when each token was made; fewer than `tokens`: it failed."""

    arrived_s: float
    token_times_s: Sequence[float]
    tokens: int
    ttft_s: float
    tbt_s: float

    @property
    def failed(self) -> bool:
        return len(self.token_times_s) < self.tokens


def tokens_in_time(request: ServedRequest) -> int:
    """Tokens made by arrival + TTFT + j x TBT, j from 0; none of a failed request."""
    if request.failed:
        return 0
    due_s = request.arrived_s + request.ttft_s
    return sum(out_s <= due_s + j * request.tbt_s for j, out_s in enumerate(request.token_times_s))


def token_attainment(requests: Sequence[ServedRequest]) -> float:
    """Share of all tokens that were made in time; 1 if there are none."""
    tokens = sum(request.tokens for request in requests)
    return sum(map(tokens_in_time, requests)) / tokens if tokens else 1.0


def service_share(request: ServedRequest) -> float:
    """Share of the time from arrival to the last token in which no token was overdue; 0 if the request failed.

    A token is due TBT after its predecessor was due, or after it was made if that was late.
    """
    if request.failed:
        return 0.0
    due_s = request.arrived_s + request.ttft_s
    overdue_s = 0.0
    for out_s in request.token_times_s:
        overdue_s += max(out_s - due_s, 0.0)
        due_s = max(out_s, due_s) + request.tbt_s
    served_s = request.token_times_s[-1] - request.arrived_s if request.token_times_s else 0.0
    return 1.0 - overdue_s / served_s if served_s > 0 else 1.0


def service_attainment(requests: Sequence[ServedRequest]) -> float:
    """Mean over the requests of `service_share`, the metric behind Aegaeon's figures; 1 if there are none."""
    return sum(map(service_share, requests)) / len(requests) if requests else 1.0


def expected_active_models(models: int, rate_per_s: float, service_s: float) -> float:
    """How many of `models` have a request in service at a time, each with Poisson arrivals (Aegaeon, theorem 3.1)."""
    return models * (1.0 - math.exp(-rate_per_s * service_s))
