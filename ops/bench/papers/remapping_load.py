"""The load of the comparison of remapping with its rivals: the paper's models, GPU, interconnects and arrivals.

The step times of the paper's GH200 are not published. Llama-2-13b's are those measured on an H100 (Aegaeon's artifact,
`llama2_13b_chat/H100`); another model's grow with its weights, and its term per context token with its KV. The time of
a layer that follows for OPT-13b, 0.46 ms with 40 requests, agrees with the paper's remark that m = alpha + 2 takes over
at alpha = 9 of 40, which puts it between 0.41 and 0.47 ms at 450 GB/s.

Arrivals are those of Azure's coding trace on a faster or slower clock, so that its bursts remain. ShareGPT's lengths
are drawn from the workloads of Aegaeon's artifact. Of Alpaca only mean lengths are published (19 tokens in, 58 out:
Kwon et al., SOSP'23, figure 11); lengths are drawn from lognormal distributions with these means.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import nan
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from dataplane.scheduling.costs import LatencyModel
from ops.simulator.traffic.traces import LISTINGS, read_listing

GPU_BYTES = 97_871 * 2**20
"""GH200's 96 GB as its driver counts them."""
ACTIVATIONS_BYTES = 10**9
"""An assumption: memory of the paper's engine in addition to weights and KV."""

H100_13B = LatencyModel(
    prefill_base_s=7.5250e-03,
    prefill_per_token_s=4.0821e-05,
    prefill_per_token2_s=0.0,
    decode_base_s=1.2504e-02,
    decode_per_context_token_s=1.4507e-07,
    decode_per_sequence_s=1.1451e-04,
)
_WEIGHTS_13B_BYTES = 2 * 13.0e9
_KV_13B_BYTES = 2 * 2 * 40 * 5120


@dataclass(frozen=True, kw_only=True)
class SharedModel:
    """A model on a shared worker. `layers_bytes`: of all its layers; `kv_bytes`: reserved for its KV."""

    name: str
    latency: LatencyModel
    layers: int
    layers_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The interconnect of host and GPU. `bytes_per_s`: one direction; `both_bytes_per_s`: the sum of both."""

    name: str
    bytes_per_s: float
    both_bytes_per_s: float


GRACE_HOPPER = Wire(name="Grace Hopper", bytes_per_s=427e9, both_bytes_per_s=366e9)
"""As the paper measured: 427 of the 450 GB/s; in both directions the host's memory is the limit."""
PCIE_5 = Wire(name="PCIe 5", bytes_per_s=55.6e9, both_bytes_per_s=100e9)
PCIE_4 = Wire(name="PCIe 4", bytes_per_s=25e9, both_bytes_per_s=45e9)
"""The sum of both directions on PCIe, nine tenths of twice one direction, is an assumption."""
WIRES = (GRACE_HOPPER, PCIE_5, PCIE_4)


def shared_model(
    name: str, *, parameters: float, layers: int, embedding_parameters: float, kv_width: int, gpu_share: float
) -> SharedModel:
    """A 16-bit model. `kv_width`: numbers that a layer's keys of one token have; `gpu_share`: its memory (table 1)."""
    weights_bytes = round(2 * parameters)
    kv_bytes_per_token = 2 * 2 * layers * kv_width
    size = weights_bytes / _WEIGHTS_13B_BYTES
    latency = replace(
        H100_13B,
        prefill_per_token_s=H100_13B.prefill_per_token_s * size,
        decode_base_s=H100_13B.decode_base_s * size,
        decode_per_context_token_s=H100_13B.decode_per_context_token_s * kv_bytes_per_token / _KV_13B_BYTES,
        decode_per_sequence_s=H100_13B.decode_per_sequence_s * size,
    )
    return SharedModel(
        name=name,
        latency=latency,
        layers=layers,
        layers_bytes=round(weights_bytes - 2 * embedding_parameters),
        kv_bytes=round(gpu_share * GPU_BYTES) - weights_bytes - ACTIVATIONS_BYTES,
        kv_bytes_per_token=kv_bytes_per_token,
    )


OPT_13B = shared_model(
    "OPT-13b", parameters=12.85e9, layers=40, embedding_parameters=0.268e9, kv_width=5120, gpu_share=0.35
)
LLAMA_2_13B = shared_model(
    "Llama-2-13b", parameters=13.02e9, layers=40, embedding_parameters=0.328e9, kv_width=5120, gpu_share=0.35
)
LLAMA_3_8B = shared_model(
    "Llama-3-8b", parameters=8.03e9, layers=32, embedding_parameters=1.05e9, kv_width=1024, gpu_share=0.20
)
OPT_30B = shared_model(
    "OPT-30b", parameters=29.97e9, layers=48, embedding_parameters=0.375e9, kv_width=7168, gpu_share=0.65
)
OPT_6_7B = shared_model(
    "OPT-6.7b", parameters=6.66e9, layers=32, embedding_parameters=0.214e9, kv_width=4096, gpu_share=0.15
)

COMBINATIONS = {
    "C1": (OPT_13B, LLAMA_2_13B, LLAMA_3_8B),
    "C2": (OPT_30B, OPT_6_7B),
    "OPT-13b": (OPT_13B,),
}
"""Table 1, and the single model of sections 7.4 to 7.6."""

Lengths = Literal["sharegpt", "alpaca", "long", "short"]
MEAN_TOKENS = {"alpaca": (19.3, 58.5), "long": (1200.0, 534.0), "short": (434.0, 200.0)}
"""In and out. The synthetic ones of the paper have 1,734 and 634 tokens in all; their parts are an assumption."""
_SIGMA = 0.6
CONTEXT_TOKENS = 2048
"""OPT's longest context. Longer requests are cut, to it and to what a model's own KV memory holds."""


@dataclass(eq=False, slots=True, kw_only=True)
class Ask:
    """A request. `made`: its output tokens so far, the first at `first_s`, the last at `last_s`."""

    number: int
    arrived_s: float
    model: str
    prompt_tokens: int
    output_tokens: int
    made: int = 0
    first_s: float = nan
    last_s: float = nan


@dataclass(frozen=True, kw_only=True)
class SharedLoad:
    """`rates`: mean requests per second of each model. `requests`: of all models."""

    rates: Sequence[float]
    lengths: Sequence[Lengths]
    requests: int = 600
    seed: int = 0

    def follow_up(self, rate: float) -> "SharedLoad":
        """As many requests of the same lengths, at `rate` of all models."""
        factor = rate / sum(self.rates)
        return replace(self, rates=[each * factor for each in self.rates], seed=self.seed + 1)


@dataclass(frozen=True, kw_only=True)
class Recordings:
    """Paths of the recordings. `workload`: the one of Aegaeon's artifact that lengths are drawn from."""

    azure: Path
    aegaeon: Path
    workload: str = "synth-40-0.7-1.0-1.0"

    def arrivals_s(self, count: int) -> npt.NDArray[np.float64]:
        """The first arrivals [count], from 0 s.

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
    """Requests ordered by arrival, which begin `after` another if given. Equal seeds give equal requests."""
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
