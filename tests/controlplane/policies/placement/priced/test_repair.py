"""Repairs of a choice of columns that does not fit."""

import numpy as np

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, PoolKey, RegionGpu
from controlplane.policies.placement.facts import PlacementFacts, PlacementModel, PoolFacts, Profile
from controlplane.policies.placement.grid import grid_of
from controlplane.policies.placement.priced.columns import Configurations, make_columns, rows_of
from controlplane.policies.placement.priced.repair import pool_gpus, relieved
from controlplane.policies.placement.priced.tables import build_tables
from tests.controlplane.policies.placement.problems import EXACT

MODELS = ("alone", "large", "moves", "small")
SHARES = {("moves", "G"): 0.2, ("moves", "H"): 0.9, ("small", "G"): 0.9, ("large", "H"): 3.95}


def two_full_pools() -> PlacementFacts:
    """A pool of one GPU, and one of slots of four beside an instance of three and a free GPU. With the model that may
    be in both, either has too few.
    """
    return PlacementFacts(
        models=tuple(PlacementModel(name=name) for name in MODELS),
        regions=("r",),
        capacity={RegionGpu(region="r", gpu_type="G"): 1, RegionGpu(region="r", gpu_type="H"): 8},
        gpu_cost_per_hour={"G": 1.0, "H": 1.0},
        profiles={
            ModelGpu(model=name, gpu_type=gpu_type): Profile(tokens_per_s=1000.0, gpus=3 if name == "alone" else 1)
            for name in MODELS
            for gpu_type in "GH"
        },
        present={},
        demand={Endpoint(model=name, region="r"): (1000.0,) for name in MODELS},
        limits={Endpoint(model=name, region="r"): (0, 1) for name in MODELS},
        pool=PoolFacts(
            occupancy={EndpointGpu(model=name, region="r", gpu_type=at): share for (name, at), share in SHARES.items()},
            weights_bytes=dict.fromkeys(MODELS, 1),
            host_bytes_per_gpu={"G": 100, "H": 100},
            fill=1.0,
            slot_gpus={PoolKey(region="r", gpu_type="H"): 4},
        ),
    )


def test_a_model_does_not_go_to_and_fro_between_full_pools() -> None:
    """It would for ever: it is small where it leaves, and the pool it joins grows by a whole slot."""
    tables = build_tables(grid_of(two_full_pools(), EXACT))
    rows = rows_of(tables)
    pools = [(MODELS.index(name), "GH".index(at), 0) for name, at in SHARES]
    nothing = [(number, -1, 0) for number in range(len(MODELS))]
    endpoint, pooled, instances = np.array([*pools, *nothing, (0, -1, 1)]).T
    counts = np.stack([0 * instances, instances], axis=1)
    columns = make_columns(tables, rows, Configurations(endpoint=endpoint, counts=counts, pooled=pooled))
    wanted = [(0, -1, 1), (1, 1, 0), (2, 0, 0), (3, 0, 0)]
    known = list(zip(columns.endpoint, columns.pooled, columns.counts[:, 1], strict=True))
    choice = relieved(tables, columns, np.array([known.index(one) for one in wanted]), np.zeros(len(rows.limit)))
    gpus = pool_gpus(tables, columns.at(choice))[0]
    assert (gpus + 3 * columns.counts[choice].sum(axis=0) <= [1, 8]).all()
