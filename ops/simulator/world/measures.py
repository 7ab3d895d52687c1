"""Measures of a run in bounded memory: sums, and histograms of times with bins that grow by 2 %."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dataplane.protocol.tiers import Tier
from ops.simulator.kernel.requests import Request, Served

FloatArray = npt.NDArray[np.float64]

_GROWTH = math.log(1.02)
_SMALLEST_S = 1e-6


class Histogram:
    """Times, each known to 1 %."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0
        self.bins: Counter[int] = Counter()

    def add(self, times_s: FloatArray) -> None:
        """Count times, none of them negative."""
        if not len(times_s):
            return
        self.count += len(times_s)
        self.sum_s += float(times_s.sum())
        self.max_s = max(self.max_s, float(times_s.max()))
        bins = np.floor(np.log(np.maximum(times_s, _SMALLEST_S) / _SMALLEST_S) / _GROWTH).astype(int)
        first = int(bins.min())
        for number, count in enumerate(np.bincount(bins - first).tolist(), first):
            if count:
                self.bins[number] += count

    def join(self, other: "Histogram") -> None:
        """Add the counts of another."""
        self.count += other.count
        self.sum_s += other.sum_s
        self.max_s = max(self.max_s, other.max_s)
        self.bins += other.bins

    def quantile(self, share: float) -> float:
        """The least time that this share of all times does not exceed, to 1 %; NaN without any."""
        rank, seen = share * self.count, 0
        for number in sorted(self.bins):
            seen += self.bins[number]
            if seen >= rank:
                return min(_SMALLEST_S * math.exp((number + 0.5) * _GROWTH), self.max_s)
        return math.nan


@dataclass(kw_only=True)
class Tally:
    """Figures of the requests of one model and tier. A failed request has no token in time."""

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
        whole = cls()
        for tally in tallies:
            for name, value in vars(tally).items():
                if isinstance(value, Histogram):
                    getattr(whole, name).join(value)
                else:
                    setattr(whole, name, getattr(whole, name) + value)
        return whole

    def add(self, block: "Block") -> None:
        """Count served requests."""
        self.ended += len(block.ttft_s)
        self.share_sum += float(block.share.sum())
        self.tokens += int(block.made.sum())
        self.tokens_in_time += int(block.in_time.sum())
        self.input_tokens += int(block.prompt_tokens.sum())
        self.ttft_violations += int((block.ttft_s > block.due_s).sum())
        self.ttft.add(block.ttft_s)
        self.service.add(block.service_s)
        self.token_gap.add(block.token_gap_s)

    def fail(self, request: Request) -> None:
        """Count a request that ended without an answer."""
        self.failed += 1
        self.tokens += request.output_tokens

    @property
    def requests(self) -> int:
        return self.ended + self.failed

    @property
    def service_attainment(self) -> float:
        """The mean of `Served.share`; 1 without requests."""
        return self.share_sum / self.requests if self.requests else 1.0

    @property
    def token_attainment(self) -> float:
        """The share of tokens in time; 1 without any."""
        return self.tokens_in_time / self.tokens if self.tokens else 1.0


class Block:
    """Requests of one model and tier that were served, as columns: times are at the origin, in seconds."""

    def __init__(self, served: Sequence[Served]) -> None:
        first_s = np.array([one.first_s for one in served])
        last_s = np.array([one.last_s for one in served])
        late_s = np.array([one.late_s for one in served])
        waited_s = np.array([one.back_s - one.request.arrived_s for one in served])
        self.made = np.array([one.made for one in served])
        self.in_time = np.array([one.in_time for one in served])
        self.prompt_tokens = np.array([one.request.prompt_tokens for one in served])
        self.due_s = np.array([one.target.ttft_s for one in served])
        self.ttft_s = first_s + waited_s
        self.service_s = last_s + waited_s
        self.share = np.where(late_s > 0, 1.0 - late_s / self.service_s, 1.0)
        """See `Served.share`."""
        many = self.made > 1
        self.token_gap_s = (last_s - first_s)[many] / (self.made[many] - 1)


def by_model_and_tier(served: Iterable[Served]) -> Mapping[tuple[str, Tier], Block]:
    """Requests, each kind for itself."""
    found: defaultdict[tuple[str, Tier], list[Served]] = defaultdict(list)
    for one in served:
        found[one.request.model, one.request.tier].append(one)
    return {key: Block(some) for key, some in found.items()}
