"""The tables of a scenario that say what comes: made-up traffic, a recording, or several of these at once. Unknown keys
are errors.
"""

import math
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from dataplane.protocol.tiers import Tier
from ops.simulator.kernel.scenario_values import Part, Positive, Share

IntArray = npt.NDArray[np.int64]

DURATION_S_MAX = 366 * 86_400.0
Shares = Annotated[dict[str, Share], Field(min_length=1)]
TierShares = Annotated[dict[Tier, Share], Field(min_length=1)]
LengthScale = Annotated[float, Field(gt=0, le=1000)]


class Lengths(Part):
    """Lognormal token counts: the median or mean before the cut to 1 .. `most`, and the logarithm's deviation."""

    median: Positive | None = None
    mean: Positive | None = None
    spread: Annotated[float, Field(ge=0, le=5)] = 1.0
    most: Annotated[int, Field(ge=1, le=10**9)] = 8192

    @model_validator(mode="after")
    def _one(self) -> "Lengths":
        if (self.median is None) == (self.mean is None):
            raise ValueError("needs median or mean, and not both")
        return self

    @property
    def cut_mean(self) -> float:
        """The mean after the cut, but for the rounding to whole tokens."""
        median = self._uncut_median
        below, above = math.log(self.most) - math.log(median), -math.log(median)
        if not self.spread:
            return min(max(median, 1.0), self.most)
        between = _normal(below / self.spread - self.spread) - _normal(above / self.spread - self.spread)
        uncut = median * math.exp(self.spread**2 / 2) * between
        return uncut + self.most * _normal(-below / self.spread) + _normal(above / self.spread)

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        drawn = rng.lognormal(math.log(self._uncut_median), self.spread, count)
        return np.clip(np.rint(drawn), 1, self.most).astype(np.int64)

    @property
    def _uncut_median(self) -> float:
        return self.median or (self.mean or 0.0) / math.exp(self.spread**2 / 2)


class Burst(Part):
    """From `start_s` on, for `duration_s`, the rate is `factor` times as high."""

    start_s: Share
    duration_s: Positive
    factor: Share


class GeneratedPart(Part):
    """Synthetic traffic. `rate_per_s`: of all models, the mean over a day. `cv`: of the intervals; Poisson has 1.
    `day_swing`: the highest rate is 1 + this times the mean, at `peak_hour`. `models`: their names by rank; None = all
    of the scenario in its order. `zipf`: the k-th of them has a share of k ** -zipf.
    """

    kind: Literal["generated"]
    rate_per_s: Positive
    duration_s: Annotated[float, Field(gt=0, le=DURATION_S_MAX)]
    cv: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    models: Annotated[list[str], Field(min_length=1)] | None = None
    zipf: Share = 0.0
    day_swing: Annotated[float, Field(ge=0, le=1)] = 0.0
    peak_hour: Annotated[float, Field(ge=0, lt=24)] = 14.0
    bursts: list[Burst] = Field(default_factory=list)
    origins: Shares
    tiers: TierShares
    prompt_tokens: Lengths
    output_tokens: Lengths

    @model_validator(mode="after")
    def _somebody(self) -> "GeneratedPart":
        _refuse_empty(self, "origins", "tiers")
        return self


class RecordedPart(Part):
    """A recording. `scale`: so many requests for each that is recorded, on average. `from_s` to `until_s`: what is
    taken, after the recording's time 0; the simulation begins at `from_s`.

    Attributes:
        origins: shares of the regions that requests come from; None = all of the scenario alike. Clients of ServeGen
            are dealt out to them by turns, in the file's order, whatever the shares.
        models: the same for models, where the file names none. A model that it names is the scenario's of that name;
            others take the scenario's by turns, in the order in which they first appear.
        tiers: shares. SageServe's "dev" is NIW whatever they are.
    """

    path: Path
    scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    from_s: Share = 0.0
    until_s: Positive | None = None
    origins: Shares | None = None
    models: Shares | None = None
    tiers: TierShares = Field(default={Tier.IW_N: 1.0})

    @model_validator(mode="after")
    def _something(self) -> "RecordedPart":
        _refuse_empty(self, "origins", "models", "tiers")
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError("until_s: must lie after from_s")
        return self

    @property
    def duration_s(self) -> float | None:
        return None if self.until_s is None else self.until_s - self.from_s

    @property
    def ends_s(self) -> float:
        return math.inf if self.until_s is None else self.until_s


class AegaeonPart(RecordedPart):
    """A workload of Aegaeon's artifact. Its models are kept apart; number i is as the scenario's i-th, by turns.
    `scale_inputs`, `scale_outputs`: prompts and answers are so many times as long.
    """

    kind: Literal["aegaeon"]
    workload: str
    scale_inputs: LengthScale = 1.0
    scale_outputs: LengthScale = 1.0
    tiers: TierShares = Field(default={Tier.IW_F: 1.0})


class ListedPart(RecordedPart):
    """A line for each request."""

    kind: Literal["azure-2023", "burstgpt", "mooncake"]


class RatesPart(RecordedPart):
    """Rates: requests (azure-2024, servegen) or input tokens (sageserve, csv) by time. See `rates`.

    Attributes:
        prompt_tokens: how long prompts are, where the file does not say. Their mean says how many requests tokens are.
        output_tokens: the same for answers.
        lengths: ServeGen's histograms of the clients' lengths; the two above are for clients that it does not know.
    """

    kind: Literal["azure-2024", "csv", "sageserve", "servegen"]
    prompt_tokens: Lengths = Lengths(mean=2560, spread=1.0, most=32_768)
    output_tokens: Lengths = Lengths(mean=200, spread=1.0, most=4096)
    lengths: Path | None = None


OnePart = GeneratedPart | ListedPart | RatesPart


class MixedPart(Part):
    """Several traffics at once, each as it would be alone: with its own models, lengths, scale, and window of its
    recording. All begin at the same moment, and it lasts as long as the longest.
    """

    kind: Literal["mixed"]
    parts: Annotated[list[Annotated[OnePart, Field(discriminator="kind")]], Field(min_length=1, max_length=100)]

    @property
    def duration_s(self) -> float | None:
        """None if that of a recording is not known."""
        durations_s = [part.duration_s for part in self.parts]
        known_s = [each_s for each_s in durations_s if each_s is not None]
        return max(known_s) if len(known_s) == len(durations_s) else None


TrafficPart = Annotated[GeneratedPart | AegaeonPart | ListedPart | RatesPart | MixedPart, Field(discriminator="kind")]


def _refuse_empty(part: Part, *names: str) -> None:
    for name in names:
        shares = getattr(part, name)
        if shares is not None and not sum(shares.values()) > 0:
            raise ValueError(f"{name}: at least one share must be over 0")


def _normal(deviations: float) -> float:
    """The share of a normal distribution that lies below."""
    return math.erfc(-deviations / math.sqrt(2)) / 2
