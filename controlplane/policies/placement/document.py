"""Placement problems between JSON documents and facts. The schema is in `document_schema.py`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import structs

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, PoolKey, RegionGpu
from controlplane.policies.placement import document_schema as schema
from controlplane.policies.placement.document_check import check
from controlplane.policies.placement.document_schema import DocumentError, Problem, decode
from controlplane.policies.placement.facts import (
    PlacementFacts,
    PlacementModel,
    PlacementSettings,
    PoolFacts,
    Profile,
    StartTimes,
)
from controlplane.policies.placement.pools import PoolLoad, occupancy_of
from dataplane.protocol.tiers import Tier

STRICTEST_FIRST = (Tier.IW_F, Tier.IW_N, Tier.NIW)


def parse(text: bytes | str) -> tuple[PlacementFacts, PlacementSettings]:
    """The facts and settings of a JSON document.

    Raises:
        DocumentError: the document is refused; the message names the field.
    """
    problem = decode(text)
    check(problem)
    try:
        return _facts(problem), _settings(problem)
    except ValueError as error:
        raise DocumentError(str(error)) from None


def to_document(facts: PlacementFacts, settings: PlacementSettings) -> dict[str, Any]:
    """The document of facts and settings, ready for JSON, in sorted order; `parse` makes the same of it again.

    Loads of pools are not in it; the occupancies computed from them are.
    """
    problem = Problem(
        regions=list(facts.regions),
        gpus=_gpus(facts),
        models=_models(facts),
        instance=_profiles(facts),
        present=_cell_counts(facts.present),
        spot=_cell_counts(facts.donated),
        demand=[schema.Demand(**_names(at), tokens_per_s=list(each)) for at, each in sorted(facts.demand.items())],
        limits=[
            schema.Limit(**_names(at), min=fewest, max=most) for at, (fewest, most) in sorted(facts.limits.items())
        ],
        pins=[schema.Pin(**_names(at), count=count) for at, count in sorted(facts.overrides.items())],
        weights=[schema.Weights(**_names(at)) for at in sorted(facts.weights_present)],
        unfit=[schema.Unfit(**_names(at), reason=reason) for at, reason in sorted(facts.unfit.items())],
        epsilon=settings.epsilon,
        pool=None if facts.pool is None else _pool(facts.pool),
        solver=schema.Solver(
            gap=settings.gap, time_limit_s=settings.time_limit_s, exact_cells_max=settings.exact_cells_max
        ),
        prices=schema.Prices(
            unserved=dict(settings.unserved_ratios),
            minimum=settings.minimum_ratio,
            pin=settings.override_ratio,
            move=settings.move_ratio,
        ),
    )
    made: dict[str, Any] = msgspec.to_builtins(problem)
    return made


def _models(facts: PlacementFacts) -> list[schema.Model]:
    weights_bytes = facts.pool.weights_bytes if facts.pool is not None else {}
    return [
        schema.Model(name=model.name, memory_bytes=weights_bytes.get(model.name, 0), tiers=[model.tier])
        for model in facts.models
    ]


def _profiles(facts: PlacementFacts) -> list[schema.Instance]:
    return [
        schema.Instance(
            model=key.model,
            gpu=key.gpu_type,
            tokens_per_s=profile.tokens_per_s,
            gpus=profile.gpus,
            start_s=schema.StartSeconds(
                local=profile.start.local_s,
                remote=profile.start.remote_s,
                spot_same=profile.start.donated_same_s,
                spot_other=profile.start.donated_other_s,
            ),
        )
        for key, profile in sorted(facts.profiles.items(), key=lambda item: item[0])
    ]


def _gpus(facts: PlacementFacts) -> list[schema.Gpu]:
    host_bytes = facts.pool.host_bytes_per_gpu if facts.pool is not None else {}
    per_region: dict[str, dict[str, int]] = {}
    for place, gpus in sorted(facts.capacity.items()):
        per_region.setdefault(place.gpu_type, {})[place.region] = gpus
    return [
        schema.Gpu(
            name=name,
            cost_per_hour=cost,
            gpus_per_region=per_region.get(name, {}),
            host_bytes=host_bytes.get(name, 0),
        )
        for name, cost in sorted(facts.gpu_cost_per_hour.items())
    ]


def _cell_counts(counts: Mapping[EndpointGpu, int]) -> list[schema.CellCount]:
    return [schema.CellCount(**_names(key), count=count) for key, count in sorted(counts.items())]


def _pool(pool: PoolFacts) -> schema.Pool:
    return schema.Pool(
        fill=pool.fill,
        occupancy=[schema.PoolShare(**_names(key), share=share) for key, share in sorted(pool.occupancy.items())],
        slots=_gpus_of_pools(pool, pool.slot_gpus),
        most=_gpus_of_pools(pool, pool.most),
        present=_gpus_of_pools(pool, pool.present),
        pooled=[schema.PooledNow(**_names(key)) for key in sorted(pool.pooled)],
    )


def _gpus_of_pools(pool: PoolFacts, gpus: Mapping[PoolKey, int]) -> list[schema.PoolGpus]:
    sizes = _worker_gpus(pool.occupancy, pool.worker_gpus)
    return [
        schema.PoolGpus(
            region=key.region,
            gpu=key.gpu_type,
            gpus=count,
            worker_gpus=0 if key.worker_gpus == sizes.get(key.place, 1) else key.worker_gpus,
        )
        for key, count in sorted(gpus.items())
    ]


def _worker_gpus(keys: Iterable[EndpointGpu], worker_gpus: Mapping[ModelGpu, int]) -> dict[RegionGpu, int]:
    """The GPUs of each worker of a place's pool, where all models that it may serve need as many."""
    sizes: defaultdict[RegionGpu, set[int]] = defaultdict(set)
    for key in keys:
        sizes[key.place].add(worker_gpus.get(key.pair, 1))
    return {place: min(found) for place, found in sizes.items() if len(found) == 1}


def _facts(problem: Problem) -> PlacementFacts:
    present = {_cell(each): each.count for each in problem.present}
    donated = {_cell(each): each.count for each in problem.spot}
    here = {key.endpoint for key, n in [*present.items(), *donated.items()] if n}
    return PlacementFacts(
        regions=tuple(problem.regions),
        models=tuple(
            PlacementModel(name=model.name, tier=min(model.tiers, key=STRICTEST_FIRST.index))
            for model in problem.models
        ),
        capacity={
            RegionGpu(region=region, gpu_type=gpu.name): count
            for gpu in problem.gpus
            for region, count in gpu.gpus_per_region.items()
        },
        profiles={
            ModelGpu(model=each.model, gpu_type=each.gpu): Profile(
                tokens_per_s=each.tokens_per_s,
                gpus=each.gpus,
                start=StartTimes(
                    local_s=each.start_s.local,
                    remote_s=each.start_s.remote,
                    donated_same_s=each.start_s.spot_same,
                    donated_other_s=each.start_s.spot_other,
                ),
            )
            for each in problem.instance
        },
        present=present,
        demand={_endpoint(each): tuple(each.tokens_per_s) for each in problem.demand},
        limits={_endpoint(each): (each.min, each.max) for each in problem.limits},
        gpu_cost_per_hour={gpu.name: gpu.cost_per_hour for gpu in problem.gpus},
        weights_present=frozenset(
            here if problem.weights is msgspec.UNSET else (_endpoint(each) for each in problem.weights)
        ),
        donated=donated,
        overrides={_endpoint(each): each.count for each in problem.pins},
        unfit={_cell(each): each.reason for each in problem.unfit},
        pool=None if problem.pool is None or not problem.pool.on else _pool_facts(problem, problem.pool),
    )


def _pool_facts(problem: Problem, pool: schema.Pool) -> PoolFacts:
    occupancy = {_cell(each): each.share for each in pool.occupancy}
    for number, each in enumerate(pool.loads):
        fields = {
            name: getattr(each, name) for name in each.__struct_fields__ if name not in {"model", "region", "gpu"}
        }
        try:
            share = occupancy_of(PoolLoad(**fields)).total
        except ValueError as error:
            raise DocumentError(f"$.pool.loads[{number}].{error}") from None
        if share:
            occupancy[_cell(each)] = share
    worker_gpus = {ModelGpu(model=each.model, gpu_type=each.gpu): each.gpus for each in problem.instance}
    worker_gpus |= {ModelGpu(model=each.model, gpu_type=each.gpu): each.gpus for each in pool.loads}
    sizes = _worker_gpus(occupancy, worker_gpus)
    return PoolFacts(
        occupancy=occupancy,
        weights_bytes={model.name: model.memory_bytes for model in problem.models if model.memory_bytes},
        host_bytes_per_gpu={gpu.name: gpu.host_bytes for gpu in problem.gpus if gpu.host_bytes},
        fill=pool.fill,
        worker_gpus={pair: gpus for pair, gpus in worker_gpus.items() if gpus > 1},
        slot_gpus=_gpus_by_pool(pool.slots, sizes),
        most=_gpus_by_pool(pool.most, sizes),
        present=_gpus_by_pool(pool.present, sizes),
        pooled=frozenset(_cell(each) for each in pool.pooled),
    )


def _settings(problem: Problem) -> PlacementSettings:
    return PlacementSettings(
        epsilon=problem.epsilon,
        time_limit_s=problem.solver.time_limit_s,
        gap=problem.solver.gap,
        unserved_ratios=dict(problem.prices.unserved),
        minimum_ratio=problem.prices.minimum,
        override_ratio=problem.prices.pin,
        move_ratio=problem.prices.move,
        exact_cells_max=problem.solver.exact_cells_max,
    )


def _gpus_by_pool(entries: Iterable[schema.PoolGpus], sizes: Mapping[RegionGpu, int]) -> dict[PoolKey, int]:
    places = ((RegionGpu(region=each.region, gpu_type=each.gpu), each) for each in entries)
    return {
        PoolKey(**structs.asdict(place), worker_gpus=each.worker_gpus or sizes.get(place, 1)): each.gpus
        for place, each in places
    }


def _names(at: Endpoint | EndpointGpu | RegionGpu) -> dict[str, Any]:
    """The names of a key, as the document calls them."""
    return {"gpu" if name == "gpu_type" else name: value for name, value in msgspec.structs.asdict(at).items()}


def _cell(each: Any) -> EndpointGpu:
    return EndpointGpu(model=each.model, region=each.region, gpu_type=each.gpu)


def _endpoint(each: Any) -> Endpoint:
    return Endpoint(model=each.model, region=each.region)
