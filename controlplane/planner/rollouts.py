"""Move roll-outs on: gather what became of each, decide, apply. Each is a transaction of its own."""

import structlog
from sqlalchemy.orm import Session

from controlplane.policies.rollout import Finish, GoBack, Hold, Shift, choose_rollout
from controlplane.settings import Settings
from controlplane.store import rollouts
from controlplane.store.alias_tables import Rollout
from controlplane.store.session import Database

log = structlog.get_logger()


def move_rollouts(database: Database, settings: Settings) -> dict[str, str]:
    """What was decided about each roll-out that has not ended and does not wait, by its id."""
    with database.transaction() as session:
        live = rollouts.live_rollouts(session)
    moved: dict[str, str] = {}
    for rollout_id in live:
        with database.transaction() as session:
            rollout = rollouts.lock_rollout(session, rollout_id)
            if rollout.ended_at is None and (what := _move(session, rollout, settings)) is not None:
                moved[rollout_id] = what
    return moved


def _move(session: Session, rollout: Rollout, settings: Settings) -> str | None:
    """Decide about a roll-out whose row is locked. None: it waits."""
    alive_s = settings.heartbeat_stale_s
    rollouts.note_instances(session, rollout, alive_s=alive_s)
    facts = rollouts.rollout_facts(session, rollout, alive_s=alive_s, patience_s=settings.scale_failed_patience_s)
    match choose_rollout(facts):
        case Hold(reason=reason):
            rollouts.hold(rollout, reason)
            return None
        case Shift(step=step):
            rollouts.shift(session, rollout, step)
            return f"{rollout.steps[step]} % to {rollout.model}"
        case Finish():
            rollouts.finish(session, rollout)
            return f"done: {rollout.alias} is {rollout.model}"
        case GoBack(reason=reason):
            rollouts.go_back(session, rollout, reason)
            return f"rolled back: {reason}"
