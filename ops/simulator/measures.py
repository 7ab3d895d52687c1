"""What a run amounts to, in bounded memory: sums, and times in a histogram of bins that grow by 2 %."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ops.simulator.requests import Request, Served

_GROWTH = math.log(1.02)
_SMALLEST_S = 1e-6


class Histogram:
    """Times, each known to 1 %."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0
        self.bins: Counter[int] = Counter()

    def add(self, time_s: float) -> None:
        """Count a time that is not negative."""
        self.count += 1
        self.sum_s += time_s
        self.max_s = max(self.max_s, time_s)
        self.bins[math.floor(math.log(time_s / _SMALLEST_S) / _GROWTH) if time_s > _SMALLEST_S else 0] += 1

    def join(self, other: "Histogram") -> None:
        """Count what another has counted."""
        self.count += other.count
        self.sum_s += other.sum_s
        self.max_s = max(self.max_s, other.max_s)
        self.bins += other.bins

    def quantile(self, share: float) -> float:
        """The least time that this share of all does not exceed, to 1 %; NaN without any."""
        rank, seen = share * self.count, 0
        for place in sorted(self.bins):
            seen += self.bins[place]
            if seen >= rank:
                return min(_SMALLEST_S * math.exp((place + 0.5) * _GROWTH), self.max_s)
        return math.nan


@dataclass(kw_only=True)
class Tally:
    """What came of the requests of one model and tier. A failed request kept nothing."""

    ended: int = 0
    failed: int = 0
    share_sum: float = 0.0
    tokens: int = 0
    tokens_in_time: int = 0
    ttft_violations: int = 0
    input_tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    service: Histogram = field(default_factory=Histogram)
    token_gap: Histogram = field(default_factory=Histogram)
    """The mean time between the tokens of a request."""

    @classmethod
    def of(cls, tallies: Iterable["Tally"]) -> "Tally":
        """All of them as one."""
        whole = cls()
        for tally in tallies:
            for name, value in vars(tally).items():
                if isinstance(value, Histogram):
                    getattr(whole, name).join(value)
                else:
                    setattr(whole, name, getattr(whole, name) + value)
        return whole

    def add(self, served: Served) -> None:
        """A request was served to its end."""
        assert not served.left
        self.ended += 1
        self.share_sum += served.share
        self.tokens += served.made
        self.tokens_in_time += served.in_time
        self.input_tokens += served.request.prompt_tokens
        self.ttft_violations += served.ttft_s > served.target.ttft_s
        self.ttft.add(served.ttft_s)
        self.service.add(served.service_s)
        if served.made > 1:
            self.token_gap.add((served.last_s - served.first_s) / (served.made - 1))

    def fail(self, request: Request) -> None:
        """A request ended without an answer."""
        self.failed += 1
        self.tokens += request.output_tokens

    @property
    def requests(self) -> int:
        """Those that are over."""
        return self.ended + self.failed

    @property
    def service_attainment(self) -> float:
        """The mean over the requests of `Served.share`; 1 without any."""
        return self.share_sum / self.requests if self.requests else 1.0

    @property
    def token_attainment(self) -> float:
        """The share of all tokens that were out in time; 1 without any."""
        return self.tokens_in_time / self.tokens if self.tokens else 1.0
