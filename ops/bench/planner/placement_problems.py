"""Placement problems that look like real fleets, from a seed: skewed models, regional days, GPU types of unlike worth.

Demand over the models falls as a power of their rank; each region has its own share and its own hour of the day.
Capacity is what one random way of serving the demand takes, times 1.1 to 1.4; what is present is near what the hour
before needed. Nothing here is tuned to a solver: a problem is as tight as its seed makes it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.policies.placement.facts import PlacementFacts, PlacementModel, PoolFacts, Profile, StartTimes
from dataplane.protocol.tiers import Tier

GPU_TYPES = (
    ("A100-80", 80, 2.6, 1.0),
    ("H100", 80, 4.9, 2.2),
    ("L40S", 48, 1.6, 0.62),
    ("H200", 141, 6.1, 2.5),
    ("A100-40", 40, 2.0, 0.9),
    ("MI300X", 192, 5.2, 2.1),
    ("A10G", 24, 0.9, 0.24),
    ("B200", 180, 9.5, 4.4),
)
"""Name, memory in GB, price per hour of one GPU, speed against an A100."""

MODEL_SIZES_1E9 = (1.5, 3.0, 7.0, 8.0, 13.0, 14.0, 27.0, 32.0, 70.0, 72.0, 120.0, 235.0)
BYTES_PER_PARAMETER = 2.6
"""bf16 weights, and the KV cache."""
A100_FLOPS_AT_SLO = 90e12
WINDOWS = 12


@dataclass(frozen=True, kw_only=True)
class ProblemShape:
    """What to make. `gpus_per_endpoint` is the mean size of the fleet; `skew` the exponent of the models' ranks.

    `tight`: capacity over need is uniform between these two. `pools`: with the facts that pooling takes.
    """

    models: int
    regions: int
    gpu_types: int
    seed: int
    gpus_per_endpoint: float = 8.0
    skew: float = 1.0
    tight: tuple[float, float] = (1.1, 1.4)
    pools: bool = False


def make_problem(shape: ProblemShape) -> PlacementFacts:
    """A problem of this shape; the same shape gives the same problem.

    Raises:
        ValueError: no models or regions, or more GPU types than `GPU_TYPES` lists.
    """
    if shape.models < 1 or shape.regions < 1 or not 1 <= shape.gpu_types <= len(GPU_TYPES):
        raise ValueError(f"need models, regions >= 1 and 1 to {len(GPU_TYPES)} GPU types, got {shape}")
    return _Maker(shape).make()


class _Maker:
    def __init__(self, shape: ProblemShape) -> None:
        self._shape = shape
        self._random = np.random.default_rng(shape.seed)
        self._models = tuple(f"m{number:04d}" for number in range(shape.models))
        self._regions = tuple(f"r{number:02d}" for number in range(shape.regions))
        self._types = GPU_TYPES[: shape.gpu_types]

    def make(self) -> PlacementFacts:
        gpus, speeds, sizes = self._profiles()
        demand = self._demand(gpus, speeds)
        fewest = self._random.choice(3, size=demand.shape[:2], p=[0.6, 0.3, 0.1])
        need = self._serve(demand.max(axis=2), fewest, gpus, speeds)
        tight = self._random.uniform(*self._shape.tight, size=need.shape[1:])
        capacity = np.ceil((need * gpus[:, None, :]).sum(axis=0) * tight).astype(int)
        hour_before = demand.max(axis=2) * self._random.uniform(0.8, 1.1, size=demand.shape[:2])
        present = self._within(self._serve(hour_before, fewest, gpus, speeds), gpus, capacity)
        weights = (present.sum(axis=2) > 0) | (self._random.random(demand.shape[:2]) < 0.5)
        return self._facts(gpus, speeds, sizes, demand, need, fewest, capacity, present, weights)

    def _profiles(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """GPUs per instance (0 = cannot), tokens/s of an instance, and bytes of weights, by model (and GPU type)."""
        sizes = self._random.choice(MODEL_SIZES_1E9, size=self._shape.models) * 1e9
        gpus = np.zeros((self._shape.models, len(self._types)), int)
        speeds = np.zeros(gpus.shape)
        for at, (_name, memory_gb, _price, speed) in enumerate(self._types):
            wanted = sizes * BYTES_PER_PARAMETER / (memory_gb * 1e9)
            count = 2 ** np.ceil(np.log2(np.maximum(wanted, 1.0))).astype(int)
            luck = self._random.lognormal(0.0, 0.15, size=self._shape.models)
            apart = count**-0.08
            gpus[:, at] = np.where(count <= 8, count, 0)
            speeds[:, at] = np.round(count * apart * luck * speed * A100_FLOPS_AT_SLO / (2 * sizes), 1)
        if (stuck := gpus.max(axis=1) == 0).any():
            gpus[stuck, 0], speeds[stuck, 0] = 8, 500.0
        return gpus, speeds, sizes * 2

    def _demand(self, gpus: NDArray[np.int64], speeds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Input tokens/s by model, region and window of 5 minutes."""
        shape = self._shape
        ranks = self._random.permutation(shape.models) + 1.0
        share = ranks[:, None] ** -shape.skew * self._random.lognormal(0.0, 0.4, size=(1, shape.regions))
        share = share * self._random.lognormal(0.0, 0.5, size=share.shape)
        hours = self._random.uniform(0, 24, size=(shape.regions, 1)) + np.arange(WINDOWS) / WINDOWS
        day = 1.0 + 0.5 * np.sin(hours / 24 * 2 * math.pi)
        noise = self._random.lognormal(0.0, 0.08, size=(shape.models, shape.regions, WINDOWS))
        raw = share[:, :, None] * day[None] * noise
        per_gpu = np.where(gpus > 0, speeds / np.maximum(gpus, 1), 0.0).mean(axis=1)
        total_gpus = shape.gpus_per_endpoint * shape.models * shape.regions
        return np.asarray(np.round(raw / raw.max(axis=2).sum() * total_gpus * per_gpu[:, None, None], 1))

    def _serve(
        self,
        peak: NDArray[np.float64],
        fewest: NDArray[np.int64],
        gpus: NDArray[np.int64],
        speeds: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        """Instances of one random way to serve these peaks, each endpoint on one or two types that it fits."""
        chance = self._random.random((*peak.shape, len(self._types))) * (gpus > 0)[:, None, :]
        first = chance.argmax(axis=2)
        np.put_along_axis(chance, first[..., None], 0.0, axis=2)
        second = np.where(chance.max(axis=2) > 0, chance.argmax(axis=2), first)
        rows = np.indices(peak.shape)
        counts = np.zeros(chance.shape, np.int64)
        some = np.floor(peak * self._random.uniform(0.5, 1.0, size=peak.shape) / speeds[rows[0], first])
        counts[(*rows, first)] += some.astype(np.int64)
        rest = np.ceil((peak - some * speeds[rows[0], first]) / speeds[rows[0], second])
        counts[(*rows, second)] += np.maximum(rest.astype(np.int64), fewest - counts.sum(axis=2))
        return counts

    def _within(
        self, present: NDArray[np.int64], gpus: NDArray[np.int64], capacity: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The same, without the last models' instances where a region lacks GPUs for them."""
        taken = np.cumsum(present * gpus[:, None, :], axis=0)
        return np.where(taken <= capacity[None], present, 0)

    def _facts(
        self,
        gpus: NDArray[np.int64],
        speeds: NDArray[np.float64],
        sizes: NDArray[np.float64],
        demand: NDArray[np.float64],
        need: NDArray[np.int64],
        fewest: NDArray[np.int64],
        capacity: NDArray[np.int64],
        present: NDArray[np.int64],
        weights: NDArray[np.bool_],
    ) -> PlacementFacts:
        tiers = self._random.choice(np.array(list(Tier)), size=len(self._models), p=[0.5, 0.3, 0.2])
        most = np.maximum(fewest, np.ceil(need.sum(axis=2) * self._random.uniform(1.2, 2.0, demand.shape[:2])) + 2)
        names = [name for name, *_ in self._types]
        endpoints = {
            (i, j): Endpoint(model=model, region=region)
            for i, model in enumerate(self._models)
            for j, region in enumerate(self._regions)
        }
        return PlacementFacts(
            regions=self._regions,
            models=tuple(
                PlacementModel(name=name, tier=Tier(tier)) for name, tier in zip(self._models, tiers, strict=True)
            ),
            capacity={
                RegionGpu(region=region, gpu_type=name): int(capacity[j, k])
                for j, region in enumerate(self._regions)
                for k, name in enumerate(names)
            },
            profiles={
                ModelGpu(model=model, gpu_type=name): Profile(
                    tokens_per_s=float(speeds[i, k]), gpus=int(gpus[i, k]), start=StartTimes()
                )
                for i, model in enumerate(self._models)
                for k, name in enumerate(names)
                if gpus[i, k]
            },
            present={
                EndpointGpu(model=self._models[i], region=self._regions[j], gpu_type=names[k]): int(present[i, j, k])
                for i, j, k in np.argwhere(present)
            },
            demand={at: tuple(demand[i, j].tolist()) for (i, j), at in endpoints.items()},
            limits={at: (int(fewest[i, j]), int(most[i, j])) for (i, j), at in endpoints.items()},
            gpu_cost_per_hour={name: price for name, _memory, price, _speed in self._types},
            weights_present=frozenset(at for (i, j), at in endpoints.items() if weights[i, j]),
            pool=self._pool(endpoints, gpus, speeds, sizes, demand) if self._shape.pools else None,
        )

    def _pool(
        self,
        endpoints: Mapping[tuple[int, int], Endpoint],
        gpus: NDArray[np.int64],
        speeds: NDArray[np.float64],
        sizes: NDArray[np.float64],
        demand: NDArray[np.float64],
    ) -> PoolFacts:
        """Occupancy: the share of one instance's work, half as much again for switching, and a floor for being there.

        Only models that fit on one GPU can be pooled.
        """
        occupancy = {}
        for (i, j), at in endpoints.items():
            for k, (name, *_rest) in enumerate(self._types):
                if gpus[i, k] == 1:
                    share = 1.5 * demand[i, j].max() / speeds[i, k] + 0.01
                    occupancy[EndpointGpu(model=at.model, region=at.region, gpu_type=name)] = float(round(share, 5))
        return PoolFacts(
            occupancy=occupancy,
            weights_bytes={model: int(size) for model, size in zip(self._models, sizes, strict=True)},
            host_bytes_per_gpu={name: 256 * 10**9 for name, *_rest in self._types},
        )


def demand_shares(facts: PlacementFacts) -> list[float]:
    """Each model's share of all demand, smallest first."""
    totals: dict[str, float] = {}
    for at, windows in facts.demand.items():
        totals[at.model] = totals.get(at.model, 0.0) + sum(windows)
    everything = sum(totals.values()) or 1.0
    return sorted(total / everything for total in totals.values())
