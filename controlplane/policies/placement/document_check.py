"""Checks of a placement document that its schema cannot express: references between sections. Errors name the field by
its path.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from controlplane.policies.placement import document_schema as schema
from controlplane.policies.placement.document_schema import DocumentError, Problem
from dataplane.protocol.tiers import Tier


def check(problem: Problem) -> None:
    """Refuse unknown names, duplicate entries, and sections that contradict each other.

    Raises:
        DocumentError: the first such field, by path.
    """
    known = {
        "model": {model.name for model in problem.models},
        "region": set(problem.regions),
        "gpu": {gpu.name for gpu in problem.gpus},
    }
    _check_distinct("$.regions", problem.regions)
    _check_distinct("$.gpus", [gpu.name for gpu in problem.gpus], ".name")
    _check_distinct("$.models", [model.name for model in problem.models], ".name")
    for number, gpu in enumerate(problem.gpus):
        for region, count in gpu.gpus_per_region.items():
            path = f"$.gpus[{number}].gpus_per_region[{region!r}]"
            if region not in known["region"]:
                raise DocumentError(f"{path}: {_unknown(region, known['region'])}")
            if count < 0:
                raise DocumentError(f"{path}: must not be negative, got {count}")
    pool = problem.pool if problem.pool is not None else schema.Pool()
    sections: dict[str, Sequence[Any]] = {
        "$.instance": problem.instance,
        "$.present": problem.present,
        "$.spot": problem.spot,
        "$.demand": problem.demand,
        "$.limits": problem.limits,
        "$.pins": problem.pins,
        "$.weights": () if problem.weights is UNSET else problem.weights,
        "$.pool.occupancy": pool.occupancy,
        "$.pool.loads": pool.loads,
        "$.pool.slots": pool.slots,
        "$.pool.most": pool.most,
        "$.pool.present": pool.present,
        "$.pool.pooled": pool.pooled,
    }
    for path, entries in sections.items():
        _check_entries(path, entries, known)
    _check_together(problem, pool)


def _check_entries(path: str, entries: Iterable[Any], known: Mapping[str, set[str]]) -> None:
    seen: dict[tuple[str | int, ...], int] = {}
    for number, entry in enumerate(entries):
        names = tuple(name for name in ("model", "region", "gpu") if hasattr(entry, name))
        for name in names:
            word = getattr(entry, name)
            if word not in known[name]:
                raise DocumentError(f"{path}[{number}].{name}: {_unknown(word, known[name])}")
        words = tuple(getattr(entry, name) for name in names)
        key = (*words, getattr(entry, "worker_gpus", 0))
        if key in seen:
            raise DocumentError(f"{path}[{number}]: {', '.join(words)} is given in {path}[{seen[key]}] already")
        seen[key] = number


def _check_together(problem: Problem, pool: schema.Pool) -> None:
    profiles = {(each.model, each.gpu) for each in problem.instance}
    for path, counts in (("$.present", problem.present), ("$.spot", problem.spot)):
        for number, each in enumerate(counts):
            if each.count and (each.model, each.gpu) not in profiles:
                raise DocumentError(f"{path}[{number}]: $.instance says nothing of {each.model} on {each.gpu}")
    for number, demand in enumerate(problem.demand):
        windows, first = len(demand.tokens_per_s), len(problem.demand[0].tokens_per_s)
        if windows != first:
            raise DocumentError(f"$.demand[{number}].tokens_per_s: {windows} windows, $.demand[0] has {first}")
    for number, limit in enumerate(problem.limits):
        if limit.min > limit.max:
            raise DocumentError(f"$.limits[{number}].min: {limit.min} is above max {limit.max}")
    if missing := sorted(set(Tier) - set(problem.prices.unserved)):
        raise DocumentError(f"$.prices.unserved: lacks {', '.join(missing)}")
    _check_pool(problem, pool)


def _check_pool(problem: Problem, pool: schema.Pool) -> None:
    shares = {(each.model, each.region, each.gpu) for each in pool.occupancy}
    for number, load in enumerate(pool.loads):
        if (load.model, load.region, load.gpu) in shares:
            raise DocumentError(f"$.pool.loads[{number}]: $.pool.occupancy says what it takes already")
    pooled = {each.model for each in pool.occupancy} | {load.model for load in pool.loads}
    for number, model in enumerate(problem.models):
        if model.name in pooled and not model.memory_bytes:
            raise DocumentError(f"$.models[{number}].memory_bytes: must be above 0, {model.name} may be pooled")


def _check_distinct(path: str, words: Sequence[str], field: str = "") -> None:
    for number, word in enumerate(words):
        if word in words[:number]:
            raise DocumentError(f"{path}[{number}]{field}: {word!r} is given twice")


def _unknown(word: str, known: set[str]) -> str:
    return f"{word!r} is unknown; known: {', '.join(sorted(known)) or 'none'}"
