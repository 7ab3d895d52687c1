"""Roll-outs: beginning one, what became of it, and what follows from a decision about it.

Whoever changes a roll-out holds the fleet's lock, then its row's. The counters of answers only rise, so what was
counted since a moment is the difference to where they stood then (`Rollout.counted`).
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import uuid_utils
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from controlplane.errors import ConflictError, InvalidValueError
from controlplane.policies.lifecycle import ROLLOUT, InstanceState, RolloutState, can_move
from controlplane.policies.rollout import (
    SETTLE_S,
    AnswerCounts,
    KeptCapacity,
    RolloutFacts,
    shifted_weights,
    total_by_region,
)
from controlplane.store.adapters import served_bases
from controlplane.store.alias_tables import Alias, Rollout
from controlplane.store.aliases import live_rollout_of, set_weights, weights_of
from controlplane.store.endpoint_summary import count_instances
from controlplane.store.events import Event
from controlplane.store.fleet import bump_index, fleet_index, fleet_version, note_change
from controlplane.store.objectives import BUCKET_S, Kept, read_models_kept
from controlplane.store.rows import Page, page, require
from controlplane.store.tables import Desired, EndpointRow, Instance, Model

_CANDIDATE, _BASELINE = "candidate", "baseline"


def begin_rollout(
    session: Session,
    *,
    alias: str,
    model: str,
    steps: Sequence[int],
    hold_s: float,
    answers_min: int,
    worse_max: float,
    keep: bool,
    created_by: str,
    alive_s: float,
) -> Rollout:
    """Begin to replace the models of an alias, or a model that has no alias yet. No request goes to the candidate
    before it has instances. A node is alive if it sent a heartbeat in the last `alive_s` seconds.

    Raises:
        NotFoundError: there is neither an alias nor a model of the name, or no such candidate.
        InvalidValueError: it answers with something else than the models before.
        ConflictError: it has all requests already, another roll-out is not over, or it is not offered in a region where
            the models before are.
    """
    before = _locked_weights(session, alias)
    require(session, Model, model, param="model")
    if (other := live_rollout_of(session, alias)) is not None:
        raise ConflictError(f"roll-out '{other}' of '{alias}' is not over", param="alias")
    replaced = sorted(before.keys() - {model})
    if not any(before[each] for each in replaced):
        raise ConflictError(f"'{alias}' is '{model}' already", param="model")
    _require_offered(session, model, replaced)
    set_weights(session, alias, {model: 0} | before)
    rollout = Rollout(
        id=f"rollout_{uuid_utils.uuid7().hex}",
        alias=alias,
        model=model,
        state=RolloutState.IN_PROGRESS,
        reason="waits for its first look",
        before=before,
        instances=_ready_instances(session, replaced, alive_s=alive_s),
        steps=list(steps),
        step=-1,
        hold_s=hold_s,
        answers_min=answers_min,
        worse_max=worse_max,
        keep=keep,
        counted={},
        created_by=created_by,
    )
    session.add(rollout)
    session.flush()
    session.refresh(rollout)
    rollout.counted = {_BASELINE: _counts(session, rollout, replaced), _CANDIDATE: _counts(session, rollout, [model])}
    bump_index(session)
    _note(session, rollout, "started", f"{alias}: {_weights_text(before)} -> {model}, in steps of {_percents(steps)}")
    return rollout


def live_rollouts(session: Session) -> list[str]:
    """Ids of those that have not ended, the oldest first."""
    return list(session.scalars(select(Rollout.id).where(Rollout.ended_at.is_(None)).order_by(Rollout.id)))


def list_rollouts(
    session: Session, *, alias: str | None, live_only: bool, after: str | None, limit: int
) -> Page[Rollout]:
    """One page, the newest first."""
    query = select(Rollout)
    if alias is not None:
        query = query.where(Rollout.alias == alias)
    if live_only:
        query = query.where(Rollout.ended_at.is_(None))
    return page(session, query, after=after, limit=limit, newest_first=True)


def lock_rollout(session: Session, rollout_id: str) -> Rollout:
    """A roll-out, for a change. It may change the fleet, which is locked first.

    Raises:
        NotFoundError: there is none of that id.
    """
    fleet_version(session, lock=True)
    rollout = require(session, Rollout, rollout_id, param="rollout_id")
    session.refresh(rollout, with_for_update=True)
    return rollout


def rollout_facts(session: Session, rollout: Rollout, *, alive_s: float, patience_s: float) -> RolloutFacts:
    """What became of a roll-out. An instance is failing if it has been failed for `patience_s` seconds."""
    states = count_instances(session, alive_s=alive_s, models=[rollout.model])
    ready = {endpoint.region: counts[InstanceState.READY] for endpoint, counts in states.items()}
    failing = _failing(session, rollout.model, patience_s=patience_s)
    held_s = session.scalar(select(func.extract("epoch", func.clock_timestamp() - rollout.step_at)))
    candidate, baseline = answers_so_far(session, rollout)
    return RolloutFacts(
        steps=tuple(rollout.steps),
        step=rollout.step,
        held_s=float(held_s or 0.0),
        hold_s=rollout.hold_s,
        answers_min=rollout.answers_min,
        worse_max=rollout.worse_max,
        instances=total_by_region(rollout.instances),
        paused=rollout.state == RolloutState.PAUSED,
        skips=rollout.skips,
        ready=ready,
        failing={region: error for region, error in failing.items() if not ready.get(region)},
        candidate=candidate,
        baseline=baseline,
    )


def note_instances(session: Session, rollout: Rollout, *, alive_s: float) -> None:
    """Remember where the models before have more ready instances than ever since the beginning: traffic has risen."""
    before = rollout.instances
    now = _ready_instances(session, before, alive_s=alive_s)
    most = {
        model: {region: max(of_model.get(region, 0), now[model].get(region, 0)) for region in of_model | now[model]}
        for model, of_model in before.items()
    }
    if most != before:
        rollout.instances = most
        note_change(session)


def answers_so_far(session: Session, rollout: Rollout) -> tuple[AnswerCounts, AnswerCounts]:
    """Answers of the candidate in this step, and of the models before since the beginning."""
    replaced = sorted(rollout.before.keys() - {rollout.model})
    now = {_CANDIDATE: _counts(session, rollout, [rollout.model]), _BASELINE: _counts(session, rollout, replaced)}
    candidate, baseline = (
        AnswerCounts(**now[each]).since(AnswerCounts(**rollout.counted.get(each, {}))) for each in now
    )
    return candidate, baseline


def hold(rollout: Rollout, reason: str) -> None:
    """Keep what a roll-out waits for."""
    rollout.reason = reason


def shift(session: Session, rollout: Rollout, step: int) -> None:
    """Give the candidate the share of a step. The models before stay targets, so that nobody deletes them."""
    share = rollout.steps[step]
    weights = dict.fromkeys(rollout.before, 0) | shifted_weights(rollout.before, rollout.model, share)
    session.refresh(require(session, Alias, rollout.alias, param="alias"), with_for_update=True)
    set_weights(session, rollout.alias, weights)
    rollout.step, rollout.skips, rollout.reason = step, False, "the step has begun"
    rollout.step_at = _now(session)
    rollout.counted = rollout.counted | {_CANDIDATE: _counts(session, rollout, [rollout.model])}
    note_change(session)
    _note(session, rollout, "shifted", f"{rollout.alias}: {share} % to {rollout.model}")


def finish(session: Session, rollout: Rollout) -> None:
    """End a roll-out: the alias is the candidate."""
    set_weights(session, rollout.alias, {rollout.model: 1})
    _end(session, rollout, RolloutState.DONE, f"{rollout.alias} is {rollout.model}")


def go_back(session: Session, rollout: Rollout, reason: str) -> None:
    """End a roll-out: the alias is what it was before.

    Raises:
        ConflictError: it has ended already.
    """
    _require_move(rollout, RolloutState.ROLLED_BACK)
    set_weights(session, rollout.alias, rollout.before)
    _end(session, rollout, RolloutState.ROLLED_BACK, reason)


def move(session: Session, rollout: Rollout, state: RolloutState) -> None:
    """Pause a roll-out, or let it go on.

    Raises:
        ConflictError: it has ended, or is in that state.
    """
    _require_move(rollout, state)
    rollout.state = state
    rollout.reason = "paused" if state == RolloutState.PAUSED else "goes on"
    _note(session, rollout, "paused" if state == RolloutState.PAUSED else "resumed", None)


def skip(rollout: Rollout) -> None:
    """End the step's waiting: the next one begins as soon as it has its instances.

    Raises:
        ConflictError: the roll-out is not in progress.
    """
    if rollout.state != RolloutState.IN_PROGRESS:
        raise ConflictError(f"roll-out '{rollout.id}' is {rollout.state}")
    rollout.skips = True


def kept_capacity(session: Session) -> list[KeptCapacity]:
    """What roll-outs ask scaling to keep: live ones, and those that ended a while ago."""
    recent = Rollout.ended_at > func.now() - timedelta(seconds=SETTLE_S)
    rows = session.scalars(select(Rollout).where(or_(Rollout.ended_at.is_(None), recent)))
    return [_kept_capacity(row) for row in rows]


def _kept_capacity(rollout: Rollout) -> KeptCapacity:
    share, next_share = _shares(rollout)
    return KeptCapacity(
        candidate=rollout.model,
        instances=rollout.instances,
        share=share,
        next_share=next_share,
        keep=rollout.keep and rollout.ended_at is None,
    )


def _shares(rollout: Rollout) -> tuple[int, int]:
    """The candidate's share now, and the next one, in percent."""
    if rollout.state == RolloutState.DONE:
        return 100, 100
    if rollout.state == RolloutState.ROLLED_BACK:
        return 0, 0
    following = min(rollout.step + 1, len(rollout.steps) - 1)
    return rollout.steps[rollout.step] if rollout.step >= 0 else 0, rollout.steps[following]


def _locked_weights(session: Session, alias: str) -> dict[str, int]:
    """The weights of an alias, which is locked after the fleet. A model that has no alias of its name gets one."""
    fleet_index(session, lock=True)
    row = session.get(Alias, alias, with_for_update=True)
    if row is None:
        require(session, Model, alias, param="alias")
        session.add(Alias(name=alias))
        session.flush()
        return {alias: 1}
    return weights_of(session, alias)


def _require_offered(session: Session, model: str, replaced: Collection[str]) -> None:
    bases = served_bases(session)
    if model in bases:
        raise ConflictError(
            f"'{model}' is served by the instances of '{bases[model]}' and has none that a roll-out could wait for:"
            " change the alias's weights instead",
            param="model",
        )
    offered = select(EndpointRow.region).where(EndpointRow.instances_max > 0)
    there = set(session.scalars(offered.where(EndpointRow.model.in_([bases.get(each, each) for each in replaced]))))
    lacking = sorted(there - set(session.scalars(offered.where(EndpointRow.model == model))))
    if lacking:
        raise ConflictError(
            f"'{model}' is not offered in {', '.join(lacking)}, where {', '.join(replaced)} is: add its endpoint there",
            param="model",
        )
    tasks = set(session.scalars(select(Model.task).where(Model.name.in_([model, *replaced]))))
    if len(tasks) > 1:
        raise InvalidValueError(f"model: '{model}' does not answer with what {', '.join(replaced)} does", param="model")


def _ready_instances(session: Session, models: Collection[str], *, alive_s: float) -> dict[str, dict[str, int]]:
    """Instances by model and region; of an adapter that is served with its base, none are its own."""
    ready: dict[str, dict[str, int]] = {model: {} for model in models}
    for endpoint, states in count_instances(session, alive_s=alive_s, models=models).items():
        if count := states[InstanceState.READY]:
            ready[endpoint.model][endpoint.region] = count
    return ready


def _failing(session: Session, model: str, *, patience_s: float) -> dict[str, str]:
    """The error of an instance that failed long ago, by region."""
    rows = session.execute(
        select(Instance.region, Instance.error).where(
            Instance.model == model,
            Instance.desired == Desired.RUNNING,
            Instance.observed == InstanceState.FAILED,
            Instance.changed_at < func.now() - timedelta(seconds=patience_s),
        )
    )
    return {region: error or "it failed" for region, error in rows}


def _counts(session: Session, rollout: Rollout, models: Collection[str]) -> dict[str, Any]:
    """What the counters of these models stand at, from those of the ten minutes in which the roll-out began."""
    whole = Kept()
    since_s = int(rollout.created_at.timestamp()) // BUCKET_S * BUCKET_S
    for kept in read_models_kept(session, models, since_s=since_s).values():
        whole.add(kept)
    return {"answers": whole.answers, "failed": whole.failed, "missed": whole.answers - whole.kept}


def _end(session: Session, rollout: Rollout, state: RolloutState, reason: str) -> None:
    rollout.state, rollout.reason, rollout.ended_at = state, reason, _now(session)
    note_change(session)
    _note(session, rollout, state.replace("_", " "), reason)


def _require_move(rollout: Rollout, state: RolloutState) -> None:
    if not can_move(ROLLOUT, RolloutState(rollout.state), state):
        raise ConflictError(f"roll-out '{rollout.id}' is {rollout.state}: {rollout.reason}")


def _now(session: Session) -> Any:
    return session.scalar(select(func.clock_timestamp()))


def _note(session: Session, rollout: Rollout, what: str, message: str | None) -> None:
    session.add(Event(kind="rollout", what=what, subject=rollout.id, model=rollout.model, message=message))


def _weights_text(weights: Mapping[str, int]) -> str:
    return ", ".join(f"{model} {weight}" for model, weight in sorted(weights.items()))


def _percents(steps: Sequence[int]) -> str:
    return ", ".join(f"{step} %" for step in steps)
