"""Demand per minute, and the forecasts made from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from controlplane.policies.facts import Endpoint
from controlplane.store.tables import DemandBucket, Forecast

IW, NIW = "IW", "NIW"
_WRITERS_TURN = 7303015


@dataclass(frozen=True, kw_only=True)
class DemandRow:
    """Input tokens per second of an endpoint in the minute that starts at `start_s` (a multiple of 60)."""

    endpoint: Endpoint
    kind: str
    start_s: int
    tokens_per_s: float


def put_demand(session: Session, rows: Iterable[DemandRow]) -> int:
    """Write demand; a minute written before is replaced, so the same rows may come twice. Returns how many came.

    Writers take turns: two that write the same minutes in different orders would wait for each other's rows.
    """
    session.execute(text("SELECT pg_advisory_xact_lock(:turn)"), {"turn": _WRITERS_TURN})
    session.execute(
        text(
            "CREATE TEMP TABLE IF NOT EXISTS incoming_demand"
            " (model text, region text, kind text, start_s bigint, tokens_per_s double precision) ON COMMIT DROP"
        )
    )
    session.execute(text("SET LOCAL statement_timeout = 0"))  # a copy lasts as long as its rows take to come
    cursor = session.connection().connection.cursor()
    count = 0
    with cursor.copy("COPY incoming_demand FROM STDIN") as copy:
        for row in rows:
            copy.write_row((row.endpoint.model, row.endpoint.region, row.kind, row.start_s, row.tokens_per_s))
            count += 1
    session.execute(
        text(
            "INSERT INTO demand_buckets (model, region, kind, start_s, tokens_per_s)"
            " SELECT DISTINCT ON (model, region, kind, start_s) * FROM incoming_demand"
            " ON CONFLICT (model, region, kind, start_s) DO UPDATE SET tokens_per_s = excluded.tokens_per_s"
        )
    )
    session.execute(text("DROP TABLE incoming_demand"))
    return count


def read_demand(
    session: Session, *, kind: str, since_s: int, until_s: int, only: Endpoint | None = None
) -> dict[Endpoint, list[tuple[float, float | None]]]:
    """(start_s, tokens_per_s) of every endpoint (or `only` one) with demand in [since_s, until_s), by time."""
    query = (
        select(DemandBucket.model, DemandBucket.region, DemandBucket.start_s, DemandBucket.tokens_per_s)
        .where(DemandBucket.kind == kind, DemandBucket.start_s >= since_s, DemandBucket.start_s < until_s)
        .order_by(DemandBucket.start_s)
    )
    if only is not None:
        query = query.where(DemandBucket.model == only.model, DemandBucket.region == only.region)
    series: dict[Endpoint, list[tuple[float, float | None]]] = {}
    for model, region, start_s, tokens_per_s in session.execute(query):
        series.setdefault(Endpoint(model=model, region=region), []).append((start_s, tokens_per_s))
    return series


def endpoints_with_demand(session: Session, *, kind: str, since_s: int, until_s: int) -> list[Endpoint]:
    """Endpoints with a demand bucket in [since_s, until_s)."""
    rows = session.execute(
        select(DemandBucket.model, DemandBucket.region)
        .where(DemandBucket.kind == kind, DemandBucket.start_s >= since_s, DemandBucket.start_s < until_s)
        .distinct()
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


def latest_demand_s(session: Session) -> int | None:
    """When the newest demand bucket starts."""
    return session.scalar(select(func.max(DemandBucket.start_s)))


def forget_demand(session: Session, *, before_s: int) -> None:
    """Drop demand older than anything a forecast reads."""
    session.execute(delete(DemandBucket).where(DemandBucket.start_s < before_s))


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


def read_forecasts(session: Session, *, origin_s: int | None, until_s: int | None = None) -> list[Forecast]:
    """The forecasts of one origin; where none is named of the newest one, not later than `until_s`."""
    known = select(func.max(Forecast.origin_s))
    newest = (known if until_s is None else known.where(Forecast.origin_s <= until_s)).scalar_subquery()
    query = select(Forecast).where(Forecast.origin_s == (newest if origin_s is None else origin_s))
    return list(session.scalars(query.order_by(Forecast.model, Forecast.region)))
