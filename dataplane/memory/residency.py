"""Where the weights of a model are loaded, and which models are evicted for them: least recently used first. Pure."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ResidentModel:
    """A model whose weights are in the slabs `[start, start + count)`.

    `used_s`: when it last ran, by any monotonic clock. `pinned`: it runs, is being loaded, or runs next; never evicted.
    """

    model: str
    start: int
    count: int
    used_s: float
    pinned: bool

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, kw_only=True)
class ResidencyFacts:
    """An arena of `slabs` slabs at one moment, and the model to load.

    `home`: where its run last started, if it had one; CUDA graphs captured with those addresses are valid there again.
    `blocked`: slabs that no eviction frees (of KV, or moving).
    """

    model: str
    slabs_needed: int
    home: int | None
    slabs: int
    residents: tuple[ResidentModel, ...]
    blocked: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class RunChoice:
    """The run starts at slab `start`, after the models of `evictions` are evicted."""

    start: int
    evictions: tuple[str, ...]


def choose_run(facts: ResidencyFacts) -> RunChoice | None:
    """The run for the model's weights; None when nothing fits.

    Its home if that is possible; else the lowest free gap; else the run whose most recently used model to evict was
    used longest ago (then the second most recently used, and so on; then the lowest). Never evicts a pinned model.
    """
    assert all(resident.model != facts.model for resident in facts.residents), f"{facts.model} is resident already"
    assert facts.slabs_needed > 0, facts.slabs_needed
    blocked = sorted(facts.blocked)
    if facts.home is not None:
        evicted = _evicted(facts, blocked, facts.home)
        if evicted is not None:
            return _choice(facts.home, evicted)
    # A run that fits still fits, for no more evictions, when it is moved down to the end of what is below it.
    ends = {
        0,
        *(resident.end for resident in facts.residents),
        *(slab + 1 for slab in blocked if slab + 1 not in facts.blocked),
    }
    options = {start: evicted for start in sorted(ends) if (evicted := _evicted(facts, blocked, start)) is not None}
    if not options:
        return None
    start = min(options, key=lambda start: (sorted((r.used_s for r in options[start]), reverse=True), start))
    return _choice(start, options[start])


def _evicted(facts: ResidencyFacts, blocked: Sequence[int], start: int) -> tuple[ResidentModel, ...] | None:
    """The models that a run at `start` evicts; None if it is impossible there. `blocked` is sorted."""
    end = start + facts.slabs_needed
    first_blocked = bisect_left(blocked, start)
    if start < 0 or end > facts.slabs or (first_blocked < len(blocked) and blocked[first_blocked] < end):
        return None
    evicted = tuple(resident for resident in facts.residents if resident.start < end and start < resident.end)
    return None if any(resident.pinned for resident in evicted) else evicted


def _choice(start: int, evicted: Sequence[ResidentModel]) -> RunChoice:
    return RunChoice(start=start, evictions=tuple(resident.model for resident in evicted))
