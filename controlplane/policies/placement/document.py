"""Placement problems between JSON documents and facts. The schema is in `document_schema.py`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
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

    Loads of pools are gone: their occupancies are in it.
    """
    problem = Problem(
        regions=list(facts.regions),
        gpus=_gpus(facts),
        models=_models(facts),
        instance=_profiles(facts),
        present=_cell_counts(facts.present),
        spot=_cell_counts(facts.spot),
        demand=[
            schema.Demand(model=at.model, region=at.region, tokens_per_s=list(windows))
            for at, windows in sorted(facts.demand.items())
        ],
        limits=[
            schema.Limit(model=at.model, region=at.region, min=fewest, max=most)
            for at, (fewest, most) in sorted(facts.limits.items())
        ],
        pins=[schema.Pin(model=at.model, region=at.region, count=pin) for at, pin in sorted(facts.pins.items())],
        weights=[schema.Weights(model=at.model, region=at.region) for at in sorted(facts.weights_present)],
        unfit=[
            schema.Unfit(model=at.model, region=at.region, gpu=at.gpu_type, reason=reason)
            for at, reason in sorted(facts.unfit.items())
        ],
        epsilon=settings.epsilon,
        pool=None if facts.pool is None else _pool(facts.pool),
        solver=schema.Solver(
            gap=settings.gap, time_limit_s=settings.time_limit_s, exact_cells_max=settings.exact_cells_max
        ),
        prices=schema.Prices(
            unserved=dict(settings.unserved_ratios),
            minimum=settings.minimum_ratio,
            pin=settings.pin_ratio,
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
                spot_same=profile.start.spot_same_s,
                spot_other=profile.start.spot_other_s,
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
    return [
        schema.CellCount(model=key.model, region=key.region, gpu=key.gpu_type, count=count)
        for key, count in sorted(counts.items())
    ]


def _pool(pool: PoolFacts) -> schema.Pool:
    return schema.Pool(
        fill=pool.fill,
        occupancy=[
            schema.PoolShare(model=key.model, region=key.region, gpu=key.gpu_type, share=share)
            for key, share in sorted(pool.occupancy.items())
        ],
        slots=_gpus_of_places(pool.slot_gpus),
        present=_gpus_of_places(pool.present),
        pooled=[schema.PooledNow(model=key.model, region=key.region, gpu=key.gpu_type) for key in sorted(pool.pooled)],
    )


def _gpus_of_places(gpus: Mapping[RegionGpu, int]) -> list[schema.PoolGpus]:
    return [
        schema.PoolGpus(region=place.region, gpu=place.gpu_type, gpus=count) for place, count in sorted(gpus.items())
    ]


def _facts(problem: Problem) -> PlacementFacts:
    present = {_cell(each): each.count for each in problem.present}
    spot = {_cell(each): each.count for each in problem.spot}
    here = {key.endpoint for key, n in [*present.items(), *spot.items()] if n}
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
                    spot_same_s=each.start_s.spot_same,
                    spot_other_s=each.start_s.spot_other,
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
        spot=spot,
        pins={_endpoint(each): each.count for each in problem.pins},
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
    return PoolFacts(
        occupancy=occupancy,
        weights_bytes={model.name: model.memory_bytes for model in problem.models if model.memory_bytes},
        host_bytes_per_gpu={gpu.name: gpu.host_bytes for gpu in problem.gpus if gpu.host_bytes},
        fill=pool.fill,
        slot_gpus={RegionGpu(region=each.region, gpu_type=each.gpu): each.gpus for each in pool.slots},
        present={RegionGpu(region=each.region, gpu_type=each.gpu): each.gpus for each in pool.present},
        pooled=frozenset(_cell(each) for each in pool.pooled),
    )


def _settings(problem: Problem) -> PlacementSettings:
    return PlacementSettings(
        epsilon=problem.epsilon,
        time_limit_s=problem.solver.time_limit_s,
        gap=problem.solver.gap,
        unserved_ratios=dict(problem.prices.unserved),
        minimum_ratio=problem.prices.minimum,
        pin_ratio=problem.prices.pin,
        move_ratio=problem.prices.move,
        exact_cells_max=problem.solver.exact_cells_max,
    )


def _cell(each: Any) -> EndpointGpu:
    return EndpointGpu(model=each.model, region=each.region, gpu_type=each.gpu)


def _endpoint(each: Any) -> Endpoint:
    return Endpoint(model=each.model, region=each.region)
