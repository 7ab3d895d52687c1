"""Roll-outs: another model replaces those of an alias in steps, and goes back by itself where it is worse."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Query
from pydantic import Field
from sqlalchemy.orm import Session

from controlplane.api.admin.fields import After, Answer, FilterWord, Limit, PageOf, RolloutPath
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import NewRollout
from controlplane.planner.schedule import enqueue
from controlplane.policies.lifecycle import RolloutState
from controlplane.policies.rollout import AnswerCounts
from controlplane.store import rollouts
from controlplane.store.alias_tables import Rollout as RolloutRow
from controlplane.store.keys import record, snapshot
from controlplane.store.rows import require

router = APIRouter(prefix="/rollouts", tags=["admin: models"], route_class=IdempotentRoute)


class AnswerCount(Answer):
    """Answers of interactive requests."""

    answers: int
    failed: int
    missed: int = Field(description="those that missed their objective, failed ones included")


class Rollout(Answer):
    """A roll-out and how far it is."""

    id: str = Field(examples=["rollout_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])
    alias: str
    model: str = Field(description="the candidate")
    state: RolloutState
    reason: str = Field(description="what it waits for, or why it ended")
    before: dict[str, int] = Field(description="the weights when it began")
    steps: list[int] = Field(description="shares in percent")
    step: int = Field(description="the index of the one in force; -1: before the first")
    hold_s: float
    answers_min: int
    worse_max: float
    keep: bool
    candidate: AnswerCount = Field(description="in this step")
    baseline: AnswerCount = Field(description="of the models before, since the roll-out began")
    created_by: str
    created_at: datetime
    step_at: datetime
    ended_at: datetime | None


@router.post("", summary="Begin a roll-out", status_code=201)
def create_rollout(
    body: NewRollout, session: SessionDep, state: StateDep, caller: Operator, after_commit: BackgroundTasks
) -> Rollout:
    """The candidate gets instances first, then its first share. Each step lasts for `hold_s` and `answers_min` at
    least, and the next one waits for the instances that its share needs. Plans made before are stale.
    """
    rollout = rollouts.begin_rollout(
        session, **body.model_dump(), created_by=caller.name, alive_s=state.settings.heartbeat_stale_s
    )
    record(session, actor=caller.name, action="rollout.create", subject=rollout.id, after=snapshot(rollout))
    after_commit.add_task(enqueue, "scale")
    after_commit.add_task(enqueue, "roll_out")
    return _shown(session, rollout)


@router.get("", summary="List roll-outs")
def list_rollouts(
    session: SessionDep,
    _: Viewer,
    alias: FilterWord = None,
    live_only: Annotated[bool, Query(description="leave out those that have ended")] = False,
    limit: Limit = 20,
    after: After = None,
) -> PageOf[Rollout]:
    """Roll-outs, the newest first."""
    page = rollouts.list_rollouts(session, alias=alias, live_only=live_only, after=after, limit=limit)
    return PageOf(data=[_shown(session, row) for row in page.rows], has_more=page.has_more, next=page.next)


@router.get("/{rollout_id}", summary="A roll-out")
def get_rollout(rollout_id: RolloutPath, session: SessionDep, _: Viewer) -> Rollout:
    """A roll-out, ended or not."""
    return _shown(session, require(session, RolloutRow, rollout_id, param="rollout_id"))


@router.post("/{rollout_id}/pause", summary="Pause a roll-out")
def pause_rollout(rollout_id: RolloutPath, session: SessionDep, caller: Operator) -> Rollout:
    """It stays at its step, but still goes back by itself where the candidate is worse."""
    with _change(session, rollout_id, caller.name, "pause") as rollout:
        rollouts.move(session, rollout, RolloutState.PAUSED)
    return _shown(session, rollout)


@router.post("/{rollout_id}/resume", summary="Let a paused roll-out go on")
def resume_rollout(rollout_id: RolloutPath, session: SessionDep, caller: Operator) -> Rollout:
    """From the step at which it was paused."""
    with _change(session, rollout_id, caller.name, "resume") as rollout:
        rollouts.move(session, rollout, RolloutState.IN_PROGRESS)
    return _shown(session, rollout)


@router.post("/{rollout_id}/promote", summary="End the waiting of a step")
def promote_rollout(
    rollout_id: RolloutPath, session: SessionDep, caller: Operator, after_commit: BackgroundTasks
) -> Rollout:
    """The next step begins as soon as it has its instances; after the last one the roll-out is done."""
    with _change(session, rollout_id, caller.name, "promote") as rollout:
        rollouts.skip(rollout)
    after_commit.add_task(enqueue, "roll_out")
    return _shown(session, rollout)


@router.post("/{rollout_id}/rollback", summary="Go back to the models before")
def roll_back(rollout_id: RolloutPath, session: SessionDep, caller: Operator) -> Rollout:
    """At once, and for good: gateways follow within seconds."""
    with _change(session, rollout_id, caller.name, "rollback") as rollout:
        rollouts.go_back(session, rollout, f"rolled back by {caller.name}")
    return _shown(session, rollout)


@contextmanager
def _change(session: Session, rollout_id: str, actor: str, what: str) -> Iterator[RolloutRow]:
    """A roll-out that the block changes, under its lock, with an audit event."""
    rollout = rollouts.lock_rollout(session, rollout_id)
    before = snapshot(rollout)
    yield rollout
    after = snapshot(rollout)
    record(session, actor=actor, action=f"rollout.{what}", subject=rollout.id, before=before, after=after)


def _shown(session: Session, row: RolloutRow) -> Rollout:
    candidate, baseline = rollouts.answers_so_far(session, row)
    columns = {name: getattr(row, name) for name in Rollout.model_fields.keys() - {"candidate", "baseline"}}
    return Rollout(**columns, candidate=_count(candidate), baseline=_count(baseline))


def _count(counts: AnswerCounts) -> AnswerCount:
    return AnswerCount(answers=counts.answers, failed=counts.failed, missed=counts.missed)
