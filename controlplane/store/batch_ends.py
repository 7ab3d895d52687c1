"""What predictions of batches' ends follow from, and where they are stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from controlplane.policies.batch_ends import BatchEnd, GroupProgress, SpeedSample
from controlplane.policies.lifecycle import BatchState, InstanceState
from controlplane.store.adapters import served_bases
from controlplane.store.batch_tables import Batch, BatchModel, BatchSpeed
from controlplane.store.fleet import heard_of
from controlplane.store.session import server_time_s
from controlplane.store.tables import Desired, Instance, Node, Profile
from dataplane.protocol.tiers import InstanceKind

_MOVES_S, _MOVES_SHARE = 10.0, 0.05
"""A predicted end is written anew when it has moved by both: seconds, and as a share of the time until then."""


@dataclass(frozen=True, kw_only=True)
class BatchProgress:
    """The open lines of all batches at the Unix time `now_s` of Postgres. By model: `finished`: completed lines since
    ever; `input_tokens`: the mean of a line's estimate.
    """

    now_s: float
    groups: tuple[GroupProgress, ...]
    finished: Mapping[str, int]
    input_tokens: Mapping[str, float]


def read_progress(session: Session) -> BatchProgress:
    """What is left of the batches in progress, and what has ever completed."""
    now_s = server_time_s(session)
    rows = session.execute(
        text(
            """
            SELECT batches.number, batches.tenant, models.model, models.requests - coalesce(counted.ended, 0) AS left,
                   CAST(extract(epoch FROM batches.deadline_at - now()) AS float8) AS due_s,
                   models.requests, models.tokens
            FROM batches JOIN batch_models AS models ON models.batch_number = batches.number
            LEFT JOIN LATERAL (
                SELECT sum(completed + failed) AS ended FROM batch_counts
                WHERE batch_number = models.batch_number AND model = models.model
            ) AS counted ON true
            WHERE batches.state = 'in_progress' AND batches.ended_at IS NULL
            """
        )
    ).all()
    sizes: dict[str, tuple[int, int]] = {}
    for row in rows:
        requests, tokens = sizes.get(row.model, (0, 0))
        sizes[row.model] = requests + row.requests, tokens + row.tokens
    finished = session.execute(
        text(
            """
            SELECT model, CAST(sum(completed) AS bigint) FROM (
                SELECT model, ended AS completed FROM batch_speeds
                UNION ALL SELECT model, completed FROM batch_counts
            ) AS every GROUP BY model
            """
        )
    )
    return BatchProgress(
        now_s=now_s,
        groups=tuple(
            GroupProgress(batch=row.number, tenant=row.tenant, model=row.model, left=int(row.left), due_s=row.due_s)
            for row in rows
            if row.left > 0
        ),
        finished=dict(finished.all()),
        input_tokens={model: tokens / requests for model, (requests, tokens) in sizes.items()},
    )


def read_speeds(session: Session) -> dict[str, SpeedSample]:
    """The last sample of each model."""
    rows = session.scalars(select(BatchSpeed).where(BatchSpeed.at.is_not(None)))
    return {
        row.model: SpeedSample(
            finished=row.finished,
            at_s=row.at.timestamp(),
            busy=row.busy,
            per_s=row.per_s,
            measured_s=None if row.measured_at is None else row.measured_at.timestamp(),
        )
        for row in rows
        if row.at is not None
    }


def write_speeds(session: Session, samples: Mapping[str, SpeedSample]) -> None:
    """Store the newest sample of each model. Rows are locked in the order of names alone, as `forget_requests` locks
    them, so that no two transactions wait for each other; of two predictions at once the second waits here.
    """
    for model, sample in sorted(samples.items()):
        values = {
            "finished": sample.finished,
            "at": _time(sample.at_s),
            "busy": sample.busy,
            "per_s": sample.per_s,
            "measured_at": None if sample.measured_s is None else _time(sample.measured_s),
        }
        statement = insert(BatchSpeed).values(model=model, **values)
        session.execute(statement.on_conflict_do_update(index_elements=["model"], set_=values))


def read_takers(session: Session, *, alive_s: float) -> dict[str, tuple[int, int, float | None]]:
    """By model, the instances that take deferred requests: how many are ready, how many are starting, and the input
    tokens/s of the ready ones by their profiles; None: not known. Those of its base, for an adapter that is served with
    that.
    """
    ready = (Instance.observed == InstanceState.READY) & heard_of(alive_s)
    starting = Instance.observed.in_((InstanceState.PENDING, InstanceState.LOADING))
    rows = session.execute(
        select(
            Instance.model,
            func.count().filter(ready),
            func.count().filter(starting),
            func.count(Profile.tokens_per_s).filter(ready),
            func.sum(Profile.tokens_per_s).filter(ready),
        )
        .join(Node, Node.name == Instance.node)
        .outerjoin(Profile, (Profile.model == Instance.model) & (Profile.gpu_type == Instance.gpu_type))
        .where(Instance.desired == Desired.RUNNING, Instance.kind != InstanceKind.IW)
        .group_by(Instance.model)
    )
    takers = {
        model: (taking, loading, float(tokens_per_s) if known and known == taking else None)
        for model, taking, loading, known, tokens_per_s in rows
    }
    return takers | {name: takers[base] for name, base in served_bases(session).items() if base in takers}


def write_ends(session: Session, ends: Mapping[int, BatchEnd], *, now_s: float) -> int:
    """Store the predictions that have changed noticeably; returns how many."""
    running = select(Batch.number, Batch.predicted_end_at, Batch.at_risk, Batch.end_reason).where(
        Batch.state == BatchState.IN_PROGRESS, Batch.ended_at.is_(None)
    )
    changed = [
        (number, end)
        for number, at, at_risk, reason in session.execute(running)
        if (end := ends.get(number)) is not None and _has_changed(end, at, at_risk, reason, now_s)
    ]
    if changed:
        session.execute(
            text(
                """
                UPDATE batches SET predicted_end_at = now() + end_in_s * interval '1 s', at_risk = risk,
                                   end_reason = reason
                FROM unnest(CAST(:numbers AS bigint[]), CAST(:ends AS float8[]), CAST(:risks AS boolean[]),
                            CAST(:reasons AS text[])) AS changed(batch, end_in_s, risk, reason)
                WHERE number = batch AND state = 'in_progress'
                """
            ),
            {
                "numbers": [number for number, _ in changed],
                "ends": [end.in_s for _, end in changed],
                "risks": [end.at_risk for _, end in changed],
                "reasons": [end.reason for _, end in changed],
            },
        )
    return len(changed)


def _has_changed(end: BatchEnd, at: datetime | None, at_risk: bool, reason: str | None, now_s: float) -> bool:
    if end.at_risk != at_risk or (end.in_s is None) != (at is None):
        return True
    if end.in_s is None or at is None:
        return end.reason != reason
    return abs(now_s + end.in_s - at.timestamp()) > max(_MOVES_S, _MOVES_SHARE * end.in_s)


def read_risk(session: Session) -> tuple[int, float]:
    """How many batches are predicted to miss their deadline, and the longest time by which one will, in seconds. A
    batch without a predicted end counts with the time since its deadline.
    """
    late = func.coalesce(Batch.predicted_end_at, func.now()) - Batch.deadline_at
    row = session.execute(
        select(func.count(), func.max(func.extract("epoch", late))).where(
            Batch.state == BatchState.IN_PROGRESS, Batch.ended_at.is_(None), Batch.at_risk
        )
    ).one()
    return row[0], max(0.0, float(row[1] or 0.0))


def ends_by_model(session: Session) -> dict[str, tuple[float | None, int]]:
    """Of the batches in progress, by model: the Unix time of the latest predicted end, as far as ends are predicted,
    and how many are predicted to miss their deadline.
    """
    rows = session.execute(
        select(
            BatchModel.model,
            func.extract("epoch", func.max(Batch.predicted_end_at)),
            func.count().filter(Batch.at_risk),
        )
        .join(Batch, Batch.number == BatchModel.batch_number)
        .where(Batch.state == BatchState.IN_PROGRESS, Batch.ended_at.is_(None))
        .group_by(BatchModel.model)
    )
    return {model: (None if end_s is None else float(end_s), at_risk) for model, end_s, at_risk in rows}


def _time(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)
