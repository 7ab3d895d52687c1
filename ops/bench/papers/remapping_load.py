"""What is asked of models that share a slot: arrivals of a recording, stretched to a rate, and lengths of a data set.

The recording is Azure's of coding requests, whose bursts stay: only its clock is made faster or slower. ShareGPT's
lengths are those of the workloads of Aegaeon's artifact, drawn at random. Of Alpaca the public mean lengths are known
(19 tokens in, 58 out: Kwon et al., SOSP'23, figure 11); they are drawn from lognormal distributions around them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from ops.bench.papers.remapping_models import SharedModel
from ops.bench.papers.remapping_tenants import Ask
from ops.simulator.traffic.traces import LISTINGS, read_listing

Lengths = Literal["sharegpt", "alpaca", "long", "short"]
MEAN_TOKENS = {"alpaca": (19.3, 58.5), "long": (1200.0, 534.0), "short": (434.0, 200.0)}
"""In and out. The synthetic ones of the paper have 1,734 and 634 tokens in all; their parts are an assumption."""
_SIGMA = 0.6
CONTEXT_TOKENS = 2048
"""OPT's longest context. Longer requests are cut, to it and to what a model's own KV memory holds."""


@dataclass(frozen=True, kw_only=True)
class SharedLoad:
    """`rates`: requests a second of each model, on average. `requests`: of all together."""

    rates: Sequence[float]
    lengths: Sequence[Lengths]
    requests: int = 600
    seed: int = 0

    def follow_up(self, rate: float) -> "SharedLoad":
        """As many requests of the same kinds at `rate` in all."""
        factor = rate / sum(self.rates)
        return replace(self, rates=[each * factor for each in self.rates], seed=self.seed + 1)


@dataclass(frozen=True, kw_only=True)
class Recordings:
    """Where the recordings lie. `workload`: of the Aegaeon artifact's, whose lengths are taken."""

    azure: Path
    aegaeon: Path
    workload: str = "synth-40-0.7-1.0-1.0"

    def arrivals_s(self, count: int) -> npt.NDArray[np.float64]:
        """The first arrivals, from 0.

        Raises:
            forecasts.importers.lines.DemandFileError: the file cannot be read.
        """
        return np.array([each.time_s for each in islice(read_listing(self.azure, LISTINGS["azure-2023"]), count)])

    def sharegpt(self) -> npt.NDArray[np.int64]:
        """Tokens in and out [requests, 2]."""
        table = pd.read_csv(self.aegaeon)
        return table.loc[table["workload"] == self.workload, ["input_len", "output_len"]].to_numpy(dtype=np.int64)


def draw_asks(
    models: Sequence[SharedModel], load: SharedLoad, recordings: Recordings, *, after: Ask | None = None
) -> list[Ask]:
    """Requests in the order in which they come, `after` another if given. Equal seeds give equal requests."""
    rng = np.random.default_rng(load.seed)
    arrivals_s = recordings.arrivals_s(load.requests)
    arrivals_s *= len(arrivals_s) / sum(load.rates) / max(arrivals_s[-1], 1e-9)
    weights = np.array(load.rates) / sum(load.rates)
    owners = rng.choice(len(models), size=len(arrivals_s), p=weights)
    tokens = {lengths: _draw(lengths, len(arrivals_s), rng, recordings) for lengths in dict.fromkeys(load.lengths)}
    asks = []
    first, began_s = (after.number + 1, after.arrived_s) if after else (0, 0.0)
    for number, (arrived_s, owner) in enumerate(zip(arrivals_s.tolist(), owners.tolist(), strict=True)):
        model = models[owner]
        most = min(CONTEXT_TOKENS, int(0.95 * model.kv_bytes // model.kv_bytes_per_token))
        prompt, output = tokens[load.lengths[owner]][number].tolist()
        prompt = min(prompt, most // 2)
        asks.append(
            Ask(
                number=first + number,
                arrived_s=began_s + arrived_s,
                model=model.name,
                prompt_tokens=prompt,
                output_tokens=min(output, most - prompt),
            )
        )
    return asks


def _draw(lengths: Lengths, count: int, rng: np.random.Generator, recordings: Recordings) -> npt.NDArray[np.int64]:
    """Tokens in and out [count, 2]."""
    if lengths == "sharegpt":
        table = recordings.sharegpt()
        return table[rng.integers(len(table), size=count)]
    medians = np.array(MEAN_TOKENS[lengths]) / np.exp(_SIGMA**2 / 2)
    return np.maximum(rng.lognormal(np.log(medians), _SIGMA, size=(count, 2)).round(), 1).astype(np.int64)
