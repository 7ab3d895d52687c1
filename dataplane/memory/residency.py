"""Whose weights leave the arena when another model's must come in.

Pure: facts go in, a decision comes out. Least recently used first; Oneiros' priorities take this place later.
"""

from dataclasses import dataclass

from dataplane.memory.arena import Run, aligned, lowest_gap


@dataclass(frozen=True, kw_only=True)
class ResidentModel:
    """A model whose weights are in the arena. `used_s`: when it last ran, on any clock that only grows."""

    model: str
    run: Run
    used_s: float


@dataclass(frozen=True, kw_only=True)
class ResidencyFacts:
    """An arena at one moment. `running` names a model whose weights are being read and must stay, if there is one."""

    residents: tuple[ResidentModel, ...]
    capacity_bytes: int
    needed_bytes: int
    running: str | None = None


def choose_evictions(facts: ResidencyFacts) -> tuple[str, ...] | None:
    """The models to evict so that one gap of `needed_bytes` exists; empty when there is one already.

    Models go in order of last use, oldest first, until a gap is wide enough. Whoever then turns out to lie outside
    of it stays, the most recently used of them first. None: even evicting all but the running one is not enough.
    """
    needed_bytes = aligned(facts.needed_bytes)
    staying = sorted(facts.residents, key=lambda resident: (resident.used_s, resident.model))
    leaving: list[ResidentModel] = []
    while not _fits(staying, facts.capacity_bytes, needed_bytes):
        oldest = next((resident for resident in staying if resident.model != facts.running), None)
        if oldest is None:
            return None
        staying.remove(oldest)
        leaving.append(oldest)
    for resident in reversed(leaving.copy()):
        if _fits([*staying, resident], facts.capacity_bytes, needed_bytes):
            leaving.remove(resident)
            staying.append(resident)
    return tuple(resident.model for resident in leaving)


def _fits(residents: list[ResidentModel], capacity_bytes: int, needed_bytes: int) -> bool:
    return lowest_gap((resident.run for resident in residents), capacity_bytes, needed_bytes) is not None
