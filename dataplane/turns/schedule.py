"""Which model of a slot runs next: a round robin of turns over the models that have work.

Pure: facts, the time and settings go in, a decision comes out. The weighted round robin of Aegaeon 4 takes this
place behind the same signature; until then every turn is equally long.
"""

from bisect import bisect_right
from dataclasses import dataclass

TIER_RANKS = {"IW-F": 0, "IW-N": 1, "NIW": 2}
"""What goes first: requests of a lower rank are admitted before those of a higher one."""


@dataclass(frozen=True, kw_only=True)
class ModelQueueFacts:
    """The queue of one model on a slot. `resident`: its weights are in the arena, so a switch to it is cheap.

    `best_tier_rank` is that of its most urgent request: 0 IW-F, 1 IW-N, 2 NIW.
    """

    model: str
    running: int
    waiting: int
    oldest_waiting_age_s: float
    resident: bool
    best_tier_rank: int

    @property
    def has_work(self) -> bool:
        """Whether a step of this model would do anything."""
        return self.running + self.waiting > 0


@dataclass(frozen=True, kw_only=True)
class TurnFacts:
    """All queues of a slot, and whose turn it is since when. One queue per model, in any order."""

    queues: tuple[ModelQueueFacts, ...]
    current_model: str | None
    turn_started_s: float


@dataclass(frozen=True, kw_only=True)
class TurnSettings:
    """`turn_time_s`: how long a model runs before another one that has work gets the slot."""

    turn_time_s: float = 0.25


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Run this model. `started_s` goes back in as `TurnFacts.turn_started_s`; it moves only when the model changes."""

    model: str
    started_s: float
    reason: str


def choose_turn(facts: TurnFacts, now_s: float, settings: TurnSettings) -> Turn | None:
    """The turn to run now, or None when no model has work.

    The current model keeps its turn while it has work and either its time is not over or nobody else has work (a
    newcomer then interrupts it at once). Otherwise the next model in name order, cyclic, takes over. A model with
    work therefore waits at most one turn of each other model: none starves.
    """
    with_work = sorted(queue.model for queue in facts.queues if queue.has_work)
    if not with_work:
        return None
    current = facts.current_model
    if current in with_work:
        if len(with_work) == 1:
            return Turn(model=current, started_s=facts.turn_started_s, reason="only model with work")
        if now_s - facts.turn_started_s < settings.turn_time_s:
            return Turn(model=current, started_s=facts.turn_started_s, reason="turn not over")
    following = 0 if current is None else bisect_right(with_work, current) % len(with_work)
    reason = "turn over" if current in with_work else "first with work"
    return Turn(model=with_work[following], started_s=now_s, reason=reason)
