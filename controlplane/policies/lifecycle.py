"""The life of instances, plans, batches and batch requests, as tables: state -> the states that may follow it.

Who moves something asks `require_move` first and writes the new state in the same transaction. Staying in a state is no
move. A state with nothing after it is terminal.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar


class InstanceState(StrEnum):
    """One copy of a model on a slot, from wanted to gone. Draining takes no new request and finishes what it has. Spot
    has finished, keeps its model and takes requests of its lessee only.
    """

    PENDING = "pending"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    SPOT = "spot"
    STOPPED = "stopped"
    FAILED = "failed"


class PlanState(StrEnum):
    """One hour's placement, from the solver's answer to what became of it. A draft may wait for an operator's word."""

    DRAFT = "draft"
    APPROVED = "approved"
    APPLYING = "applying"
    APPLIED = "applied"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    ROLLED_BACK = "rolled_back"
    REJECTED = "rejected"


class BatchState(StrEnum):
    """An offline job; the words are those of the OpenAI Batch API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class BatchRequestState(StrEnum):
    """One line of a batch. Running means leased; a lease that ends without a result makes it wait again."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


LOST = "lost"
"""Shown in place of an instance's state while its node is not heard of: nobody knows what became of it."""


def shown_state(observed: str, *, node_alive: bool) -> str:
    """The state of an instance as everybody is shown it: what its node last said, while the node is heard of."""
    return observed if node_alive or observed == InstanceState.STOPPED else LOST


State = TypeVar("State", bound=StrEnum)
Machine = Mapping[State, frozenset[State]]

_I, _P, _B, _R = InstanceState, PlanState, BatchState, BatchRequestState

# Heartbeats are a second apart, so an observation may skip a state. A node that restarts or is lost takes its instances
# back to pending; a draining instance may be taken back (ready) when demand returns before it is empty, or a spot one
# afterwards.
_LIVE = frozenset({_I.PENDING, _I.LOADING, _I.READY, _I.DRAINING, _I.SPOT, _I.FAILED})
INSTANCE: Machine[InstanceState] = MappingProxyType(
    {state: (_LIVE - {state}) | {_I.STOPPED} for state in _LIVE} | {_I.STOPPED: frozenset()}
)

PLAN: Machine[PlanState] = MappingProxyType(
    {
        _P.DRAFT: frozenset({_P.APPROVED, _P.REJECTED, _P.SUPERSEDED, _P.FAILED}),
        _P.APPROVED: frozenset({_P.APPLYING, _P.SUPERSEDED, _P.FAILED}),
        _P.APPLYING: frozenset({_P.APPLIED, _P.FAILED}),
        _P.APPLIED: frozenset({_P.SUPERSEDED, _P.ROLLED_BACK}),
        _P.SUPERSEDED: frozenset(),
        _P.FAILED: frozenset(),
        _P.ROLLED_BACK: frozenset(),
        _P.REJECTED: frozenset(),
    }
)

BATCH: Machine[BatchState] = MappingProxyType(
    {
        _B.VALIDATING: frozenset({_B.IN_PROGRESS, _B.FAILED, _B.CANCELLING, _B.EXPIRED}),
        _B.IN_PROGRESS: frozenset({_B.FINALIZING, _B.FAILED, _B.CANCELLING, _B.EXPIRED}),
        _B.FINALIZING: frozenset({_B.COMPLETED, _B.FAILED, _B.EXPIRED}),
        _B.CANCELLING: frozenset({_B.CANCELLED}),
        _B.COMPLETED: frozenset(),
        _B.FAILED: frozenset(),
        _B.EXPIRED: frozenset(),
        _B.CANCELLED: frozenset(),
    }
)

BATCH_REQUEST: Machine[BatchRequestState] = MappingProxyType(
    {
        _R.WAITING: frozenset({_R.RUNNING, _R.EXPIRED, _R.CANCELLED, _R.FAILED}),
        _R.RUNNING: frozenset({_R.WAITING, _R.COMPLETED, _R.FAILED, _R.EXPIRED, _R.CANCELLED}),
        _R.COMPLETED: frozenset(),
        _R.FAILED: frozenset(),
        _R.EXPIRED: frozenset(),
        _R.CANCELLED: frozenset(),
    }
)


def can_move(machine: Machine[State], before: State, after: State) -> bool:
    """Whether the machine lets `before` be followed by `after`."""
    return after in machine[before]


def require_move(machine: Machine[State], before: State, after: State) -> None:
    """Let an allowed move pass.

    Raises:
        ValueError: the move is not allowed; the message names both states and those that are.
    """
    if can_move(machine, before, after):
        return
    allowed = ", ".join(sorted(machine[before])) or "nothing: it is terminal"
    raise ValueError(f"{type(before).__name__} {before} cannot become {after}; allowed: {allowed}")


def is_terminal(machine: Machine[State], state: State) -> bool:
    """Whether nothing follows this state."""
    return not machine[state]


def terminal_states(machine: Machine[State]) -> frozenset[State]:
    """All states that nothing follows."""
    return frozenset(state for state, after in machine.items() if not after)
