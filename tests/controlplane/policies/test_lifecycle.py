from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import pytest

from controlplane.policies.lifecycle import (
    BATCH,
    BATCH_REQUEST,
    INSTANCE,
    PLAN,
    ROLLOUT,
    BatchRequestState,
    BatchState,
    InstanceState,
    PlanState,
    RolloutState,
    can_move,
    require_move,
    terminal_states,
)

MACHINES = [
    (INSTANCE, InstanceState),
    (PLAN, PlanState),
    (BATCH, BatchState),
    (BATCH_REQUEST, BatchRequestState),
    (ROLLOUT, RolloutState),
]
FIRST = {
    InstanceState: InstanceState.PENDING,
    PlanState: PlanState.DRAFT,
    BatchState: BatchState.VALIDATING,
    BatchRequestState: BatchRequestState.WAITING,
    RolloutState: RolloutState.IN_PROGRESS,
}


def reachable(machine: Mapping[Any, frozenset[Any]], start: Any) -> set[Any]:
    seen, todo = {start}, [start]
    while todo:
        for after in machine[todo.pop()] - seen:
            seen.add(after)
            todo.append(after)
    return seen


@pytest.mark.parametrize(("machine", "states"), MACHINES)
def test_every_state_is_in_its_table_reachable_and_can_end(
    machine: Mapping[Any, frozenset[Any]], states: type[StrEnum]
) -> None:
    assert set(machine) == set(states)
    assert reachable(machine, FIRST[states]) == set(states)
    ends = terminal_states(machine)
    assert ends
    for state in states:
        assert reachable(machine, state) & ends
        assert state not in machine[state]


@pytest.mark.parametrize(
    ("machine", "terminal"),
    [
        (INSTANCE, {InstanceState.STOPPED}),
        (PLAN, {PlanState.SUPERSEDED, PlanState.FAILED, PlanState.ROLLED_BACK, PlanState.REJECTED}),
        (ROLLOUT, {RolloutState.DONE, RolloutState.ROLLED_BACK}),
        (BATCH, {BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED}),
        (
            BATCH_REQUEST,
            {
                BatchRequestState.COMPLETED,
                BatchRequestState.FAILED,
                BatchRequestState.EXPIRED,
                BatchRequestState.CANCELLED,
            },
        ),
    ],
)
def test_terminal_states(machine: Mapping[Any, frozenset[Any]], terminal: set[Any]) -> None:
    assert terminal_states(machine) == terminal


@pytest.mark.parametrize(
    ("machine", "before", "after", "allowed"),
    [
        (INSTANCE, InstanceState.READY, InstanceState.PENDING, True),  # its node restarted
        (INSTANCE, InstanceState.STOPPED, InstanceState.READY, False),
        (INSTANCE, InstanceState.DRAINING, InstanceState.READY, True),  # revived
        (INSTANCE, InstanceState.STOPPED, InstanceState.PENDING, False),
        (PLAN, PlanState.APPLIED, PlanState.APPLYING, False),  # applied once
        (PLAN, PlanState.APPLIED, PlanState.ROLLED_BACK, True),
        (PLAN, PlanState.REJECTED, PlanState.APPROVED, False),
        (BATCH, BatchState.CANCELLING, BatchState.COMPLETED, False),
        (BATCH_REQUEST, BatchRequestState.RUNNING, BatchRequestState.WAITING, True),  # a lease ended
        (BATCH_REQUEST, BatchRequestState.COMPLETED, BatchRequestState.RUNNING, False),  # one result per request
    ],
)
def test_moves(machine: Mapping[Any, frozenset[Any]], before: Any, after: Any, *, allowed: bool) -> None:
    assert can_move(machine, before, after) is allowed
    if allowed:
        require_move(machine, before, after)
    else:
        with pytest.raises(ValueError, match=f"{before} cannot become {after}"):
            require_move(machine, before, after)


def test_a_refused_move_names_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="allowed: approved, failed, rejected, superseded"):
        require_move(PLAN, PlanState.DRAFT, PlanState.APPLIED)
    with pytest.raises(ValueError, match="it is terminal"):
        require_move(BATCH, BatchState.EXPIRED, BatchState.COMPLETED)


def test_tables_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        BATCH[BatchState.EXPIRED] = frozenset({BatchState.COMPLETED})  # type: ignore[index]
