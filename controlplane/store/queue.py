"""The NIW queue: claims with SKIP LOCKED, leases in database time, and results written once, by the newest claim alone.

A claim is fenced by its epoch (see `QueuedRequest`). One transaction claims for all endpoints with capacity, and one
writes all results that are ready.

Each statement forces one query plan, since leases change faster than Postgres's statistics: a claim continues from the
rows that it locked (`ctid`), an ended claim is recognized by its epoch, not by its lease, and results find their rows
from a `MATERIALIZED` query of unknown length, so that they never scan the table.
"""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import extract, func, select, text, tuple_, update
from sqlalchemy.orm import Session

from controlplane.policies.facts import GroupFacts
from controlplane.policies.lifecycle import BatchRequestState, BatchState
from controlplane.store.batch_tables import Batch, QueuedRequest
from controlplane.store.batches import COUNT_WRITTEN, end_batch_requests, end_requests
from controlplane.store.notifications import Wake, notify
from controlplane.store.storable import storable

_JSON = msgspec.json.Encoder()
_COUNTED_EACH, _COUNTED_ALL = 16, 16_000
GROUPS_MAX = 1000
"""A dispatcher claims a few hundred requests at once, of so many batch-model groups at most."""
_LOST_DELAY_MAX_S = 60


class Claim(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request leased to one dispatcher. Writes for it name `epoch`, and are refused once there is a newer one.
    `body`: JSON as it was stored. `attempts` counts this claim too.
    """

    batch_number: int
    line: int
    epoch: int
    batch_id: str
    tenant: str
    endpoint: str
    model: str
    body: str
    attempts: int

    @property
    def fence(self) -> str:
        """The request's name across its claims."""
        return f"{self.batch_id}/{self.line}"

    @property
    def first(self) -> bool:
        """Whether the request was never claimed before."""
        return self.epoch == 1

    @property
    def key(self) -> tuple[int, int]:
        """The request's key in every table of the queue."""
        return self.batch_number, self.line


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a claimed request ended: with a response (`status_code` and `body`), or with the `error` that says why."""

    claim: Claim
    status_code: int | None = None
    body: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    upstream_id: str = ""
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def content(self) -> dict[str, Any] | None:
        """The response's body, or the error."""
        return storable(self.error) if self.status_code is None else self.body


_GROUPS = text(
    """
    SELECT open.number, open.tenant, open.model,
           CAST(extract(epoch FROM now() - open.created_at) AS float8),
           CAST(extract(epoch FROM open.deadline_at - now()) AS float8) AS left_s, first.waiting,
           CAST(ended.tokens / nullif(ended.completed, 0) AS float8),
           CAST(open.input_tokens AS float8) / open.requests, open.requests - coalesce(ended.requests, 0)
    FROM (
        SELECT batches.number, tenant, model, created_at, deadline_at, models.tokens AS input_tokens, models.requests,
               row_number() OVER (PARTITION BY model, tenant ORDER BY deadline_at, batches.number) AS rank,
               count(*) OVER () AS groups
        FROM batches JOIN batch_models AS models ON models.batch_number = batches.number
        WHERE state = 'in_progress' AND ended_at IS NULL AND deadline_at > now()
        ORDER BY rank, deadline_at, batches.number
    ) AS open
    CROSS JOIN LATERAL (
        SELECT count(*) AS waiting FROM (
            SELECT 1 FROM queued_requests
            WHERE batch_number = open.number AND queued_requests.model = open.model AND lease_until IS NULL
              AND (not_before IS NULL OR not_before <= now())
            LIMIT least(:waiting_max, greatest(:each, :all / least(open.groups, :groups_max)))
        ) AS due
    ) AS first
    CROSS JOIN LATERAL (
        SELECT sum(input_tokens + output_tokens) AS tokens, sum(completed) AS completed,
               CAST(sum(completed + failed) AS integer) AS requests
        FROM batch_counts
        WHERE batch_number = open.number AND batch_counts.model = open.model
    ) AS ended
    WHERE first.waiting > 0
    LIMIT :groups_max
    """  # the queue is read in the order of `open`, no further than the limit
)


def batch_groups(
    session: Session, *, waiting_max: int = _COUNTED_EACH, groups_max: int = GROUPS_MAX
) -> tuple[GroupFacts, ...]:
    """What waits, by batch and model, the nearest deadline first. Of each group, up to `waiting_max` requests are
    counted (sixteen where so many groups wait that this would count more than 16,000 in all). Of more than `groups_max`
    groups, each model and tenant has its nearest deadlines among them, so that no tenant's batches hide another's.
    """
    rows = session.execute(
        _GROUPS,
        {"waiting_max": waiting_max, "each": _COUNTED_EACH, "all": _COUNTED_ALL, "groups_max": groups_max},
    )
    return tuple(
        GroupFacts(
            batch=batch,
            tenant=tenant,
            model=model,
            age_s=age,
            left_s=left,
            waiting=waiting,
            tokens=tokens,
            input_tokens=prompt,
            left=open_lines,
        )
        for batch, tenant, model, age, left, waiting, tokens, prompt, open_lines in sorted(
            rows, key=lambda row: (row.left_s, row.number)
        )
    )


_CLAIM = text(
    """
    UPDATE queued_requests AS queued
    SET epoch = queued.epoch + 1, attempts = queued.attempts + 1, not_before = NULL,
        lease_until = now() + :lease_s * interval '1 s'
    FROM batch_requests AS asked, batches
    WHERE queued.ctid = ANY (ARRAY(
        SELECT due.row
        FROM unnest(CAST(:batches AS bigint[]), string_to_array(:models, chr(10)), CAST(:counts AS bigint[]))
             AS wanted(batch_number, model, count)
        CROSS JOIN LATERAL (
            SELECT ctid AS row FROM queued_requests
            WHERE batch_number = wanted.batch_number AND model = wanted.model AND lease_until IS NULL
              AND (not_before IS NULL OR not_before <= now())
            ORDER BY line LIMIT wanted.count FOR UPDATE SKIP LOCKED
        ) AS due
    ))
    AND asked.batch_number = queued.batch_number AND asked.line = queued.line AND batches.number = queued.batch_number
    RETURNING queued.batch_number, queued.line, queued.epoch, batches.id, batches.tenant, batches.endpoint,
              queued.model, CAST(asked.body AS text), queued.attempts
    """
)


def claim(session: Session, wanted: Mapping[tuple[int, str], int], *, lease_s: int) -> list[Claim]:
    """Lease waiting requests: of each (batch number, model) up to so many, in the order of their lines."""
    groups = sorted(wanted)
    rows = session.execute(
        _CLAIM,
        {
            "batches": _array([batch for batch, _ in groups]),
            "models": "\n".join([model for _, model in groups]),
            "counts": _array([wanted[group] for group in groups]),
            "lease_s": lease_s,
        },
    )
    claims = [
        Claim(
            batch_number=number,
            line=line,
            epoch=epoch,
            batch_id=batch_id,
            tenant=tenant,
            endpoint=endpoint,
            model=model,
            body=body,
            attempts=attempts,
        )
        for number, line, epoch, batch_id, tenant, endpoint, model, body, attempts in rows.all()
    ]
    return sorted(claims, key=lambda claim: claim.key)


def renew(session: Session, held: Sequence[Claim], *, lease_s: int) -> set[tuple[int, int]]:
    """Extend leases; returns the keys of the requests whose newest claim is among `held`. A row that another
    transaction has locked is skipped and counts as held.
    """
    ours = (
        select(QueuedRequest.batch_number, QueuedRequest.line)
        .where(_claimed_as(held))
        .with_for_update(skip_locked=True)
        .subquery()
    )
    session.execute(
        update(QueuedRequest)
        .where(QueuedRequest.batch_number == ours.c.batch_number, QueuedRequest.line == ours.c.line)
        .values(lease_until=func.now() + func.make_interval(0, 0, 0, 0, 0, 0, lease_s))
    )
    kept = select(QueuedRequest.batch_number, QueuedRequest.line).where(_claimed_as(held))
    return {(number, line) for number, line in session.execute(kept)}


_LOCKED = """
    ARRAY(SELECT number FROM unnest(CAST(:numbers AS bigint[])) AS number
          WHERE pg_try_advisory_xact_lock_shared(-number))
"""
"""The batches that no other transaction is ending as a whole, nor can end until this one is over, so that no two wait
for each other's rows.
"""
_FINISH = text(
    f"""
    WITH given AS MATERIALIZED (
        SELECT CAST(:batches AS bigint[]) AS batches, CAST(:lines AS bigint[]) AS lines,
               CAST(:epochs AS bigint[]) AS epochs, CAST(:codes AS bigint[]) AS codes,
               string_to_array(:contents, chr(10), 'null') AS contents, string_to_array(:upstream, chr(10)) AS upstream,
               CAST(:inputs AS bigint[]) AS inputs, CAST(:outputs AS bigint[]) AS outputs,
               {_LOCKED} AS locked
    ), done AS (
        SELECT done.* FROM given CROSS JOIN LATERAL unnest(
            batches, lines, epochs, codes, contents, upstream, inputs, outputs
        ) WITH ORDINALITY AS done(
            batch_number, line, epoch, status_code, content, upstream_id, input_tokens, output_tokens, place
        )
        WHERE batch_number = ANY (locked)
    ), ended AS (
        DELETE FROM queued_requests AS queued USING done
        WHERE queued.batch_number = done.batch_number AND queued.line = done.line AND queued.epoch = done.epoch
        RETURNING done.*, queued.model, CASE WHEN done.status_code < 400 THEN 'completed' ELSE 'failed' END AS state
    ), written AS (
        INSERT INTO batch_results
            (batch_number, line, state, status_code, body, error, upstream_id, input_tokens, output_tokens)
        SELECT batch_number, line, state, status_code, CASE WHEN status_code IS NOT NULL THEN CAST(content AS json) END,
               CASE WHEN status_code IS NULL THEN CAST(content AS jsonb) END, coalesce(upstream_id, ''), input_tokens,
               output_tokens
        FROM ended
    ), counted AS ({COUNT_WRITTEN})
    SELECT locked, (SELECT array_agg(place) FROM ended) FROM given
    """  # noqa: S608 - of constants
)


def finish(session: Session, outcomes: Sequence[Outcome]) -> dict[tuple[int, int], bool]:
    """Write the one result of each request; returns by key whether it was written. If not, a newer claim exists, or the
    request was ended with its batch. A key is missing while a transaction is ending the batch: whether there is a
    result to write is known when it is over, and it is not waited for, so that results of other batches are written.
    """
    done = sorted([(outcome.claim.key, outcome) for outcome in outcomes], key=itemgetter(0))
    keys = [key for key, _ in done]
    locked, places = session.execute(
        _FINISH,
        {
            "numbers": _array(sorted({number for number, _ in keys})),
            "batches": _array([number for number, _ in keys]),
            "lines": _array([line for _, line in keys]),
            "epochs": _array([outcome.claim.epoch for _, outcome in done]),
            "codes": _array([outcome.status_code for _, outcome in done]),
            "contents": _JSON.encode_lines([outcome.content for _, outcome in done]).decode().removesuffix("\n"),
            "upstream": "\n".join([outcome.upstream_id for _, outcome in done]),
            "inputs": _array([outcome.input_tokens for _, outcome in done]),
            "outputs": _array([outcome.output_tokens for _, outcome in done]),
        },
    ).one()
    free, written = set(locked), {keys[place - 1] for place in places or ()}
    return {key: key in written for key in keys if key[0] in free}


_GIVE_BACK = text(
    f"""
    WITH given AS MATERIALIZED (
        SELECT CAST(:batches AS bigint[]) AS batches, CAST(:lines AS bigint[]) AS lines,
               CAST(:epochs AS bigint[]) AS epochs, {_LOCKED} AS locked
    ), ours AS (
        SELECT claimed.* FROM given CROSS JOIN LATERAL unnest(batches, lines, epochs)
                         AS claimed(batch_number, line, epoch)
        WHERE batch_number = ANY (locked)
    )
    UPDATE queued_requests AS queued
    SET epoch = queued.epoch + 1, attempts = queued.attempts - :untried, lease_until = NULL, last_error = :error,
        not_before = now() + :delay_s * interval '1 s'
    FROM ours
    WHERE queued.batch_number = ours.batch_number AND queued.line = ours.line AND queued.epoch = ours.epoch
    RETURNING queued.line
    """  # noqa: S608 - of constants
)


def give_back(session: Session, *held: Claim, delay_s: float, error: str, tried: bool) -> int:
    """Let requests wait again, for at least `delay_s`; returns how many. `tried`: a node had them, so the attempt
    counts. Nothing is written for one whose claim is no longer the newest, or whose batch is being ended: it ends then,
    or waits until its lease is over.
    """
    rows = session.execute(
        _GIVE_BACK,
        {
            "numbers": _array(sorted({claim.batch_number for claim in held})),
            "batches": _array([claim.batch_number for claim in held]),
            "lines": _array([claim.line for claim in held]),
            "epochs": _array([claim.epoch for claim in held]),
            "untried": 0 if tried else 1,
            "error": storable(error[:2000]),
            "delay_s": delay_s,
        },
    ).all()
    if rows:
        notify(session, Wake.RELEASE, delay_s=delay_s)
    return len(rows)


def expire_leases(session: Session, *, attempts_max: int, count_max: int) -> int:
    """Let up to so many requests with an expired lease wait again; those without attempts left end as failed. Each
    waits for a random time that grows: a request that crashes dispatchers is then not claimed together with the same
    others again.
    """
    over = (
        select(QueuedRequest.batch_number, QueuedRequest.line, QueuedRequest.attempts, QueuedRequest.last_error)
        .where(QueuedRequest.lease_until < func.now())
        .limit(count_max)
        .with_for_update(skip_locked=True)
    )
    rows = session.execute(over).all()
    poison = [(number, line) for number, line, attempts, _ in rows if attempts >= attempts_max]
    again = [(number, line) for number, line, attempts, _ in rows if attempts < attempts_max]
    end_requests(session, poison, state=BatchRequestState.FAILED)
    if again:
        random_s = func.random() * func.least(func.power(2.0, QueuedRequest.attempts), _LOST_DELAY_MAX_S)
        delays_s = session.scalars(
            update(QueuedRequest)
            .where(tuple_(QueuedRequest.batch_number, QueuedRequest.line).in_(again))
            .values(
                epoch=QueuedRequest.epoch + 1,
                lease_until=None,
                not_before=func.now() + func.make_interval(0, 0, 0, 0, 0, 0, random_s),
                last_error="the lease ran out",
            )
            .returning(extract("epoch", QueuedRequest.not_before - func.now()))
        )
        for whole_s in sorted({math.ceil(delay_s) for delay_s in delays_s}):
            notify(session, Wake.RELEASE, delay_s=whole_s)
    return len(rows)


def overdue_batches(session: Session) -> Sequence[int]:
    """The numbers of the batches in progress that are past their deadline."""
    running = (Batch.state == BatchState.IN_PROGRESS, Batch.ended_at.is_(None))
    return session.scalars(select(Batch.number).where(*running, Batch.deadline_at < func.now())).all()


def expire_requests(session: Session, number: int) -> int:
    """End the open requests of a batch past its deadline as expired. A batch has a transaction of its own, since one
    may have very many requests.
    """
    return end_batch_requests(session, number, state=BatchRequestState.EXPIRED)


def _claimed_as(held: Sequence[Claim]) -> Any:
    key = tuple_(QueuedRequest.batch_number, QueuedRequest.line, QueuedRequest.epoch)
    return key.in_([(claim.batch_number, claim.line, claim.epoch) for claim in held])


def _array(values: Sequence[int | None]) -> str:
    """Numbers as a Postgres array literal: many times faster than a list, which the driver inspects."""
    return "{" + msgspec.json.encode(values).decode()[1:-1] + "}"
