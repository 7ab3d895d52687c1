"""Demand per minute, and the forecasts made from it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    CheckConstraint,
    Index,
    Subquery,
    exists,
    func,
    literal,
    or_,
    select,
    text,
    true,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, distinct_on, insert
from sqlalchemy.orm import Mapped, Session, mapped_column, undefer

from controlplane.policies.facts import Endpoint
from controlplane.policies.plan_explanations import ForecastRecord
from controlplane.store.rows import copy_rows, delete_some
from controlplane.store.session import lift_time_limit
from controlplane.store.tables import Base, Json

IW, NIW = "IW", "NIW"
_WRITERS_TURN = 7303015
_HOUR_S, _WINDOW_S, _MINUTE_S = 3600, 300, 60
_SCORED_WITHIN_S, _MEASURED_AFTER_S = 6 * 3600, 300
"""Forecasts that could not be scored for so long never are; demand of a minute is complete so long after it."""


class DemandBucket(Base):
    """Input tokens per second of one minute. `kind`: IW (both interactive tiers) or NIW. No row of kind IW is zero
    where minute and endpoint were measured (`DemandMinute`, `DemandSpan`); any other minute without a row is a gap.
    `imported_at`: when it was imported; None: it was measured.
    """

    __tablename__ = "demand_buckets"
    __table_args__ = (
        CheckConstraint("kind IN ('IW', 'NIW')", name="kind_known"),
        CheckConstraint("mod(start_s, 60) = 0", name="minute"),
        CheckConstraint("tokens_per_s >= 0", name="positive"),
        Index("ix_demand_buckets_start_s", "start_s"),
    )
    model: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    start_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tokens_per_s: Mapped[float]
    imported_at: Mapped[datetime | None]


class DemandMinute(Base):
    """A minute that was measured: some gateway was counting in it."""

    __tablename__ = "demand_minutes"
    __table_args__ = (CheckConstraint("mod(start_s, 60) = 0", name="minute"),)
    start_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class DemandSpan(Base):
    """An endpoint is measured from the minute `since_s` until before `until_s`; None: it is still."""

    __tablename__ = "demand_spans"
    __table_args__ = (
        CheckConstraint("until_s > since_s", name="order"),
        Index("uq_demand_spans_open", "model", "region", unique=True, postgresql_where=text("until_s IS NULL")),
    )
    model: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    since_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    until_s: Mapped[int | None]


class Forecast(Base):
    """The forecast of one series for the hour after `origin_s`, and its forecaster. `actual_peak`: what came, as soon
    as that hour's demand is known. `candidates` and `state` take kilobytes each and are read only where they are asked
    for.
    """

    __tablename__ = "forecasts"
    __table_args__ = (Index("ix_forecasts_origin_s", "origin_s"),)
    model: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    origin_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    forecaster: Mapped[str]
    peak_q50: Mapped[float]
    peak_upper: Mapped[float]
    quantile: Mapped[float]
    actual_peak: Mapped[float | None]
    path: Mapped[list[Any]]
    candidates: Mapped[Json] = mapped_column(deferred=True)
    state: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True), deferred=True)
    reason: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ForecastScore(Base):
    """How the forecasts of one origin did, over all series whose hour of demand is known (`ForecastRecord`)."""

    __tablename__ = "forecast_scores"
    origin_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    hours: Mapped[int]
    covered: Mapped[int]
    error_sum: Mapped[float]
    actual_sum: Mapped[float]


@dataclass(frozen=True, kw_only=True)
class DemandRow:
    """Input tokens per second of an endpoint in the minute that starts at `start_s` (a multiple of 60)."""

    endpoint: Endpoint
    kind: str
    start_s: int
    tokens_per_s: float


def put_demand(session: Session, rows: Iterable[DemandRow], *, imported: bool = False) -> int:
    """Write demand; a minute written before is replaced, so writing the same rows again is safe. Returns the number of
    rows read. `imported`: it was not measured here just now but may be of any age, and is kept as if it was of today.

    Writers take turns: two that write the same minutes in different orders would wait for each other's rows.
    """
    _take_turn(session)
    session.execute(
        text(
            "CREATE TEMP TABLE IF NOT EXISTS incoming_demand"
            " (model text, region text, kind text, start_s bigint, tokens_per_s double precision) ON COMMIT DROP"
        )
    )
    lift_time_limit(session)
    values = ((row.endpoint.model, row.endpoint.region, row.kind, row.start_s, row.tokens_per_s) for row in rows)
    count = copy_rows(session, "incoming_demand", values)
    session.execute(
        text(
            "INSERT INTO demand_buckets (model, region, kind, start_s, tokens_per_s, imported_at)"
            " SELECT DISTINCT ON (model, region, kind, start_s) *, CASE WHEN :imported THEN now() END"
            " FROM incoming_demand ON CONFLICT (model, region, kind, start_s) DO UPDATE"
            " SET tokens_per_s = excluded.tokens_per_s, imported_at = excluded.imported_at"
        ),
        {"imported": imported},
    )
    session.execute(text("DROP TABLE incoming_demand"))
    return count


def _take_turn(session: Session) -> None:
    session.execute(text("SELECT pg_advisory_xact_lock(:turn)"), {"turn": _WRITERS_TURN})


def note_measured(session: Session, endpoints: Collection[Endpoint], *, minutes: Sequence[int]) -> None:
    """Note that `minutes` (in order) were measured for these endpoints: from now on an endpoint without a row of kind
    IW in one of them had no demand there. Endpoints that were measured before and are not named any more are measured
    no longer.
    """
    if not minutes or not endpoints:
        return
    _take_turn(session)
    before_s = session.scalar(select(func.max(DemandMinute.start_s)))
    spans = session.scalars(select(DemandSpan).where(DemandSpan.until_s.is_(None)))
    measured = {Endpoint(model=span.model, region=span.region): span for span in spans}
    until_s = (before_s or 0) + _MINUTE_S
    for endpoint in measured.keys() - set(endpoints):
        if until_s > measured[endpoint].since_s:
            measured[endpoint].until_s = until_s
        else:
            session.delete(measured[endpoint])
    session.flush()
    if new := set(endpoints) - measured.keys():
        ended = select(DemandSpan.model, DemandSpan.region, func.max(DemandSpan.until_s))
        rows = session.execute(ended.group_by(DemandSpan.model, DemandSpan.region))
        over_s = {Endpoint(model=model, region=region): over_s or 0 for model, region, over_s in rows}
        session.add_all(
            DemandSpan(model=each.model, region=each.region, since_s=max(minutes[0], over_s.get(each, 0)))
            for each in sorted(new)
        )
        session.flush()
    session.execute(insert(DemandMinute).on_conflict_do_nothing(), [{"start_s": start_s} for start_s in minutes])


def _known(kind: str, *, since_s: int, until_s: int, only: Sequence[Endpoint] | None = None) -> Subquery:
    """What is known of demand in [since_s, until_s), zeros without a row included: `model`, `region`, `start_s` and
    `tokens_per_s`. `only`: of these endpoints.
    """
    bucket, minute, span = DemandBucket, DemandMinute, DemandSpan
    named = None if only is None else [(each.model, each.region) for each in only]
    rows = select(bucket.model, bucket.region, bucket.start_s, bucket.tokens_per_s).where(
        bucket.kind == kind, bucket.start_s >= since_s, bucket.start_s < until_s
    )
    if named is not None:
        rows = rows.where(tuple_(bucket.model, bucket.region).in_(named))
    if kind != IW:
        return rows.subquery("known")
    has_row = exists().where(
        bucket.model == span.model,
        bucket.region == span.region,
        bucket.kind == IW,
        bucket.start_s == minute.start_s,
    )
    measured = (minute.start_s >= span.since_s) & or_(span.until_s.is_(None), minute.start_s < span.until_s)
    zeros = (
        select(span.model, span.region, minute.start_s, literal(0.0))
        .join(minute, measured)
        .where(minute.start_s >= since_s, minute.start_s < until_s, ~has_row)
    )
    if named is not None:
        zeros = zeros.where(tuple_(span.model, span.region).in_(named))
    return union_all(rows, zeros).subquery("known")


def read_demand(
    session: Session, *, kind: str, since_s: int, until_s: int, only: Endpoint | None = None
) -> dict[Endpoint, list[tuple[float, float | None]]]:
    """(start_s, tokens_per_s) of every endpoint (or `only` one) with demand in [since_s, until_s), by time."""
    known = _known(kind, since_s=since_s, until_s=until_s, only=None if only is None else [only]).c
    query = select(known.model, known.region, known.start_s, known.tokens_per_s).order_by(known.start_s)
    series: dict[Endpoint, list[tuple[float, float | None]]] = {}
    for model, region, start_s, tokens_per_s in session.execute(query):
        series.setdefault(Endpoint(model=model, region=region), []).append((start_s, tokens_per_s))
    return series


def read_demand_elsewhere(
    session: Session, endpoint: Endpoint, *, since_s: int, until_s: int
) -> list[tuple[float, float | None]]:
    """(start_s, tokens_per_s) of the interactive demand for its model in all other regions in [since_s, until_s), by
    time.
    """
    known = _known(IW, since_s=since_s, until_s=until_s).c
    query = (
        select(known.start_s, func.sum(known.tokens_per_s))
        .where(known.model == endpoint.model, known.region != endpoint.region)
        .group_by(known.start_s)
        .order_by(known.start_s)
    )
    return [(start_s, tokens_per_s) for start_s, tokens_per_s in session.execute(query)]


def endpoints_with_demand(session: Session, *, kind: str, since_s: int, until_s: int) -> list[Endpoint]:
    """Endpoints of which demand is known in [since_s, until_s), be it none. One look into the primary key for each,
    however long the history is.
    """
    rows = session.execute(
        text(
            """
            WITH RECURSIVE known AS (
                (SELECT model, region FROM demand_buckets ORDER BY model, region LIMIT 1)
                UNION ALL
                SELECT later.model, later.region FROM known CROSS JOIN LATERAL (
                    SELECT model, region FROM demand_buckets
                    WHERE (model, region) > (known.model, known.region) ORDER BY model, region LIMIT 1
                ) AS later
            )
            SELECT model, region FROM known WHERE EXISTS (
                SELECT FROM demand_buckets AS bucket
                WHERE bucket.model = known.model AND bucket.region = known.region AND bucket.kind = :kind
                AND bucket.start_s >= :since_s AND bucket.start_s < :until_s
            )
            UNION
            SELECT model, region FROM demand_spans AS span WHERE :kind = :iw AND EXISTS (
                SELECT FROM demand_minutes AS minute
                WHERE minute.start_s >= greatest(:since_s, span.since_s)
                AND minute.start_s < least(:until_s, span.until_s)
            )
            """
        ),
        {"kind": kind, "iw": IW, "since_s": since_s, "until_s": until_s},
    )
    return sorted(Endpoint(model=model, region=region) for model, region in rows)


def mean_demand(session: Session, *, kind: str, since_s: int, until_s: int) -> dict[Endpoint, float]:
    """Mean tokens/s of every endpoint over [since_s, until_s), minutes without a row counting as none."""
    rows = session.execute(
        select(DemandBucket.model, DemandBucket.region, func.sum(DemandBucket.tokens_per_s))
        .where(DemandBucket.kind == kind, DemandBucket.start_s >= since_s, DemandBucket.start_s < until_s)
        .group_by(DemandBucket.model, DemandBucket.region)
    )
    minutes = max(1, (until_s - since_s) // 60)
    return {Endpoint(model=model, region=region): total / minutes for model, region, total in rows}


def peak_demand(session: Session, *, kind: str, since_s: int, until_s: int) -> dict[Endpoint, float]:
    """The highest minute of every endpoint with demand in [since_s, until_s), tokens/s."""
    known = _known(kind, since_s=since_s, until_s=until_s).c
    rows = session.execute(
        select(known.model, known.region, func.max(known.tokens_per_s)).group_by(known.model, known.region)
    )
    return {Endpoint(model=model, region=region): peak for model, region, peak in rows}


def latest_demand_s(session: Session) -> int | None:
    """When the newest minute starts of which any demand is known."""
    newest_row = select(func.max(DemandBucket.start_s)).scalar_subquery()
    newest_minute = select(func.max(DemandMinute.start_s)).scalar_subquery()
    return session.scalar(select(func.greatest(newest_row, newest_minute)))


def put_forecasts(session: Session, forecasts: Sequence[Forecast]) -> None:
    """Write forecasts; the same origin forecast again is replaced."""
    columns = [column.name for column in Forecast.__table__.columns if column.name != "created_at"]
    for forecast in forecasts:
        values = {name: getattr(forecast, name) for name in columns}
        session.execute(
            insert(Forecast)
            .values(**values)
            .on_conflict_do_update(index_elements=["model", "region", "origin_s"], set_=values)
        )


def read_forecasts(
    session: Session, *, origin_s: int | None, until_s: int | None = None, with_candidates: bool = False
) -> list[Forecast]:
    """The forecasts of one origin; where none is named of the newest one, not later than `until_s`."""
    known = select(func.max(Forecast.origin_s))
    newest = (known if until_s is None else known.where(Forecast.origin_s <= until_s)).scalar_subquery()
    query = select(Forecast).where(Forecast.origin_s == (newest if origin_s is None else origin_s))
    if with_candidates:
        query = query.options(undefer(Forecast.candidates))
    return list(session.scalars(query.order_by(Forecast.model, Forecast.region)))


def read_forecast_state(session: Session, endpoint: Endpoint, *, before_s: int) -> Mapping[str, Any] | None:
    """What the newest forecast of this endpoint with an origin before `before_s` left for the next, if any."""
    query = (
        select(Forecast.state)
        .where(Forecast.model == endpoint.model, Forecast.region == endpoint.region)
        .where(Forecast.origin_s < before_s, Forecast.state.is_not(None))
        .order_by(Forecast.origin_s.desc())
        .limit(1)
    )
    return session.scalar(query)


def drop_forecast_states(session: Session, endpoint: Endpoint, *, before_s: int) -> None:
    """Forget the states of older forecasts: only the newest is read, and one takes several kilobytes."""
    session.execute(
        update(Forecast)
        .where(Forecast.model == endpoint.model, Forecast.region == endpoint.region)
        .where(Forecast.origin_s < before_s, Forecast.state.is_not(None))
        .values(state=None)
    )


def last_forecasts(session: Session, *, since_s: int, before_s: int) -> dict[Endpoint, Forecast]:
    """The newest forecast of every endpoint with an origin in [since_s, before_s)."""
    query = (
        select(Forecast)
        .ext(distinct_on(Forecast.model, Forecast.region))
        .where(Forecast.origin_s >= since_s, Forecast.origin_s < before_s)
        .order_by(Forecast.model, Forecast.region, Forecast.origin_s.desc())
    )
    return {Endpoint(model=row.model, region=row.region): row for row in session.scalars(query)}


class ForecastOutcome(NamedTuple):
    """A forecast whose hour is over, in input tokens per second."""

    model: str
    region: str
    origin_s: int
    quantile: float
    peak_q50: float
    peak_upper: float
    actual_peak: float


def read_outcomes(session: Session, *, since_s: int, until_s: int) -> list[ForecastOutcome]:
    """The forecasts with an origin in [since_s, until_s) whose hour's peak has been stored."""
    query = select(*(getattr(Forecast, name) for name in ForecastOutcome._fields)).where(
        Forecast.origin_s >= since_s, Forecast.origin_s < until_s, Forecast.actual_peak.is_not(None)
    )
    return [ForecastOutcome(*row) for row in session.execute(query)]


def read_record(
    session: Session, endpoints: Sequence[Endpoint] | None, *, since_s: int, until_s: int
) -> ForecastRecord:
    """How forecasts of `endpoints` (None: of all) with an origin in [since_s, until_s] did in the hour after it, where
    all of that hour's demand is known.
    """
    peaks = _peaks(endpoints, since_s=since_s, until_s=until_s)
    hours, covered, error_sum, actual_sum = session.execute(
        select(
            func.count(),
            func.count().filter(peaks.c.actual <= peaks.c.peak_upper),
            func.coalesce(func.sum(func.abs(peaks.c.peak_q50 - peaks.c.actual)), 0.0),
            func.coalesce(func.sum(peaks.c.actual), 0.0),
        )
    ).one()
    return ForecastRecord(hours=hours, covered=covered, error_sum=error_sum, actual_sum=actual_sum)


def _peaks(endpoints: Sequence[Endpoint] | None, *, since_s: int, until_s: int) -> Subquery:
    """Forecasts with the peak that came, of 5-minute means as forecasts have them, where all of its hour is known."""
    named = None if endpoints is None else [(each.model, each.region) for each in endpoints]
    known = _known(IW, since_s=since_s, until_s=until_s + _HOUR_S, only=endpoints)
    window = ((known.c.start_s - Forecast.origin_s) // _WINDOW_S).label("window")
    forecast = (Forecast.model, Forecast.region, Forecast.origin_s, Forecast.peak_q50, Forecast.peak_upper)
    means = (
        select(*forecast, func.avg(known.c.tokens_per_s).label("mean"))
        .join_from(Forecast, known, (known.c.model == Forecast.model) & (known.c.region == Forecast.region))
        .where(
            known.c.start_s >= Forecast.origin_s,
            known.c.start_s < Forecast.origin_s + _HOUR_S,
            Forecast.origin_s.between(since_s, until_s),
            true() if named is None else tuple_(Forecast.model, Forecast.region).in_(named),
        )
        .group_by(*forecast, window)
        .subquery()
    )
    hour = (means.c.model, means.c.region, means.c.origin_s, means.c.peak_q50, means.c.peak_upper)
    actual = func.max(means.c.mean).label("actual")
    complete = func.count() == _HOUR_S // _WINDOW_S
    return select(*hour, actual).group_by(*hour).having(complete).subquery()


def score_forecasts(session: Session, *, now_s: int) -> int:
    """Store how the forecasts of the last hours did, each and together, as far as their hour is over, its demand is
    known and they have no score yet; returns of how many origins.
    """
    over = Forecast.origin_s.between(now_s - _SCORED_WITHIN_S, now_s - _HOUR_S - _MEASURED_AFTER_S)
    scored = exists().where(ForecastScore.origin_s == Forecast.origin_s)
    count = 0
    for origin_s in session.scalars(select(Forecast.origin_s).where(over, ~scored).distinct()).all():
        record = read_record(session, None, since_s=origin_s, until_s=origin_s)
        if record.hours:
            session.execute(insert(ForecastScore).values(origin_s=origin_s, **asdict(record)).on_conflict_do_nothing())
            peaks = _peaks(None, since_s=origin_s, until_s=origin_s)
            same = tuple(getattr(Forecast, name) == peaks.c[name] for name in ("model", "region", "origin_s"))
            session.execute(update(Forecast).where(*same).values(actual_peak=peaks.c.actual))
            count += 1
    return count


def read_scores(session: Session, *, since_s: float) -> ForecastRecord:
    """How the forecasts with an origin after the Unix time `since_s` did together, as far as they have a score."""
    score = ForecastScore
    sums = (func.coalesce(func.sum(column), 0) for column in (score.hours, score.covered))
    float_sums = (func.coalesce(func.sum(column), 0.0) for column in (score.error_sum, score.actual_sum))
    row = session.execute(select(*sums, *float_sums).where(score.origin_s > since_s)).one()
    return ForecastRecord(hours=int(row[0]), covered=int(row[1]), error_sum=row[2], actual_sum=row[3])


def forget_forecasts(session: Session, *, before_s: int, count_max: int) -> int:
    """Delete at most `count_max` forecasts with an origin before the Unix time `before_s`, and as many scores; returns
    how many forecasts.
    """
    score = ForecastScore
    delete_some(session, score, score.origin_s < before_s, order=score.origin_s, count_max=count_max)
    return delete_some(session, Forecast, Forecast.origin_s < before_s, order=Forecast.origin_s, count_max=count_max)


def forget_demand(session: Session, *, before_s: int, count_max: int) -> int:
    """Delete at most `count_max` minutes of demand from before the Unix time `before_s`; returns how many. A trace that
    was imported may be older: it stays until its import is as long ago.
    """
    imported_at = DemandBucket.imported_at
    old = (DemandBucket.start_s < before_s, or_(imported_at.is_(None), imported_at < func.to_timestamp(before_s)))
    return delete_some(session, DemandBucket, *old, order=DemandBucket.start_s, count_max=count_max)


def forget_measured_minutes(session: Session, *, before_s: int, count_max: int) -> int:
    """Delete at most `count_max` records of measured minutes before the Unix time `before_s`, and as many of endpoints
    that were measured until then; returns the larger count.
    """
    spans = DemandSpan.until_s < before_s
    minutes = DemandMinute.start_s < before_s
    return max(
        delete_some(session, DemandSpan, spans, order=DemandSpan.until_s, count_max=count_max),
        delete_some(session, DemandMinute, minutes, order=DemandMinute.start_s, count_max=count_max),
    )
