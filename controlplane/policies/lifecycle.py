"""The life of instances, plans, batches, batch requests and roll-outs, as tables: state -> the states that may
follow it.

Who moves something asks `require_move` first and writes the new state in the same transaction. Staying in a state is no
move. A state with nothing after it is terminal.
"""

from collections.abc import Mapping, Set
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar


class InstanceState(StrEnum):
    """One copy of a model on a slot, from wanted to gone. Draining takes no new request and finishes what it has. Spot
    (donated) has finished, keeps its model loaded and takes requests of its lessee only.
    """

    PENDING = "pending"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    SPOT = "spot"
    STOPPED = "stopped"
    FAILED = "failed"


class PlanState(StrEnum):
    """One hour's placement, from the solver's answer to its end. A draft may wait for an operator's approval."""

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


class RolloutState(StrEnum):
    """Another model replacing those of an alias, from its first request for instances to its end."""

    IN_PROGRESS = "in_progress"
    PAUSED = "paused"
    DONE = "done"
    ROLLED_BACK = "rolled_back"


class NodeState(StrEnum):
    """What a node is, in one word, wherever it is shown. Alive: it sends heartbeats and takes instances; draining: an
    operator takes it out of service; leaving: its agent shuts down; silent: it sends no heartbeats and is not missed,
    since it was drained, shut down in order or never heard of; lost: it is silent and missed.
    """

    ALIVE = "alive"
    DRAINING = "draining"
    LEAVING = "leaving"
    SILENT = "silent"
    LOST = "lost"


LOST = "lost"
"""Shown instead of an instance's state while its node sends no heartbeats: the real state is unknown."""


def shown_state(observed: str, *, node_alive: bool) -> str:
    """The state of an instance as it is displayed: what its node last reported, while the node sends heartbeats."""
    return observed if node_alive or observed == InstanceState.STOPPED else LOST


State = TypeVar("State", bound=StrEnum)
Machine = Mapping[State, frozenset[State]]


def _machine(states: type[State], following: Mapping[State, Set[State]]) -> Machine[State]:
    """A table of all states; those without following ones are terminal."""
    return MappingProxyType({state: frozenset(following.get(state, ())) for state in states})


_I, _P, _B, _R, _O = InstanceState, PlanState, BatchState, BatchRequestState, RolloutState

# Heartbeats are a second apart, so an observation may skip a state. A node that restarts or is lost takes its instances
# back to pending; a draining instance may be reclaimed (ready) when demand returns before it is empty, or a donated one
# afterwards.
_LIVE = frozenset(_I) - {_I.STOPPED}
INSTANCE: Machine[InstanceState] = _machine(_I, {state: (_LIVE - {state}) | {_I.STOPPED} for state in _LIVE})
PLAN: Machine[PlanState] = _machine(
    _P,
    {
        _P.DRAFT: {_P.APPROVED, _P.REJECTED, _P.SUPERSEDED, _P.FAILED},
        _P.APPROVED: {_P.APPLYING, _P.SUPERSEDED, _P.FAILED},
        _P.APPLYING: {_P.APPLIED, _P.FAILED},
        _P.APPLIED: {_P.SUPERSEDED, _P.ROLLED_BACK},
    },
)
BATCH: Machine[BatchState] = _machine(
    _B,
    {
        _B.VALIDATING: {_B.IN_PROGRESS, _B.FAILED, _B.CANCELLING, _B.EXPIRED},
        _B.IN_PROGRESS: {_B.FINALIZING, _B.FAILED, _B.CANCELLING, _B.EXPIRED},
        _B.FINALIZING: {_B.COMPLETED, _B.FAILED, _B.EXPIRED},
        _B.CANCELLING: {_B.CANCELLED},
    },
)
BATCH_REQUEST: Machine[BatchRequestState] = _machine(
    _R,
    {
        _R.WAITING: {_R.RUNNING, _R.EXPIRED, _R.CANCELLED, _R.FAILED},
        _R.RUNNING: {_R.WAITING, _R.COMPLETED, _R.FAILED, _R.EXPIRED, _R.CANCELLED},
    },
)

ROLLOUT: Machine[RolloutState] = _machine(
    _O,
    {
        _O.IN_PROGRESS: {_O.PAUSED, _O.DONE, _O.ROLLED_BACK},
        _O.PAUSED: {_O.IN_PROGRESS, _O.ROLLED_BACK},
    },
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


def terminal_states(machine: Machine[State]) -> frozenset[State]:
    """All states that nothing follows."""
    return frozenset(state for state, after in machine.items() if not after)
