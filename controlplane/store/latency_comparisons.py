"""Times to first tokens and between tokens that requests had, beside those that their profiles predict."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, Select, delete, func, insert, select, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.policies.facts import EndpointGpu, ModelGpu
from controlplane.policies.latency_comparison import LatencyComparison, MeasuredLatency, TierLatency
from controlplane.store.request_log import LoggedRequest
from controlplane.store.tables import Base, Json, Profile

READ_MAX = 100_000
"""The newest requests that are read at most: about a second of work for Postgres, however many there were."""
_KEPT = text("interval '2 hours'")
"""So long after it was made a comparison is shown: one hourly run may fail."""
_LOCK = 0x6C61_7465  # of an advisory lock, so that two runs do not both write in place of the run before


class LatencyComparisonRow(Base):
    """An endpoint on a GPU type, as of the last hourly run: how many requests it had, their mean times and those
    predicted (None: nothing was, or infinite times), the load by which they were, and what to make of it. `tiers`:
    first tokens by tier, as `TierLatency` has them.
    """

    __tablename__ = "latency_comparisons"
    __table_args__ = (CheckConstraint("requests > 0", name="measured"),)
    model: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    gpu_type: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[int]
    ttft_s: Mapped[float]
    predicted_ttft_s: Mapped[float | None]
    tbt_s: Mapped[float | None]
    predicted_tbt_s: Mapped[float | None]
    batch: Mapped[float | None]
    prefill_share: Mapped[float | None]
    prompt_tokens: Mapped[float]
    context_tokens: Mapped[float]
    tiers: Mapped[Json] = mapped_column(JSONB)
    differs: Mapped[bool]
    reason: Mapped[str]
    compared_at: Mapped[datetime] = mapped_column(server_default=func.now())


# The newest requests by the index on `ended_at`, and none that two nodes tried: their times are of both. Deferred ones
# wait on purpose. Where a sample is logged, late ones are logged all the same, so none is read that might be one.
_MEASURE = text(
    """
    WITH newest AS (
        SELECT instance_id, tier, first_token_s - placed_s AS ttft_s, duration_s - first_token_s AS decode_s,
               prompt_tokens::float8 AS p, least(coalesce(cached_tokens, 0), prompt_tokens)::float8 AS c,
               completion_tokens - 1 AS later, prompt_tokens + completion_tokens::float8 / 2 AS context,
               outcome = 'ok' AND continuations = 0 AND cardinality(nodes) = 1 AND tier IN ('IW-F', 'IW-N')
                   AND prompt_tokens > 0 AND completion_tokens > 0 AND first_token_s >= placed_s
                   AND (CAST(:first_token_max_s AS float8) IS NULL OR first_token_s < :first_token_max_s) AS counts
        FROM request_log WHERE ended_at >= to_timestamp(:since_s) ORDER BY ended_at DESC LIMIT :read_max
    ), placed AS (
        SELECT instances.model, instances.region, instances.gpu_type, newest.*, p - c AS x, p * p - c * c AS y
        FROM newest JOIN instances ON instances.id = newest.instance_id
            JOIN slots ON slots.node = instances.node AND slots.index = instances.slot
        WHERE counts AND NOT instances.pooled AND slots.workers = 1
    )
    SELECT model, region, gpu_type, tier, count(*) AS requests, avg(ttft_s) AS ttft_s,
           sum(decode_s) FILTER (WHERE later > 0) / nullif(sum(later), 0) AS tbt_s, avg(decode_s) AS decode_s,
           avg(p) AS prompt_tokens, coalesce(sum(later * context) / nullif(sum(later), 0), avg(p)) AS context_tokens,
           avg(x) AS x, avg(y) AS y, avg(x * x) AS xx, avg(y * y) AS yy, avg(x * y) AS xy,
           percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (ORDER BY ttft_s) AS ttft_quantiles_s
    FROM placed GROUP BY GROUPING SETS ((model, region, gpu_type), (model, region, gpu_type, tier))
    """
)
_NOT_MEANS = {"model", "region", "gpu_type", "tier", "ttft_quantiles_s"}


def measured_since_s(session: Session, *, since_s: float, read_max: int = READ_MAX) -> float:
    """The Unix time since which `measure_latency` reads all requests that ended: `since_s`, or when the oldest of the
    newest `read_max` did.
    """
    ended_at = LoggedRequest.ended_at
    newest = select(ended_at).where(ended_at >= func.to_timestamp(since_s)).order_by(ended_at.desc())
    oldest = session.scalar(newest.offset(read_max - 1).limit(1))
    return since_s if oldest is None else oldest.timestamp()


def measure_latency(
    session: Session, *, since_s: float, first_token_max_s: float | None = None, read_max: int = READ_MAX
) -> dict[EndpointGpu, MeasuredLatency]:
    """What the interactive requests that ended since the Unix time `since_s` had of instances with GPUs of their own,
    on slots of one worker each: several workers of an instance have several queues, or decode elsewhere than prefill.
    `first_token_max_s`: those that waited longer are left out, for where not all others are logged.
    """
    asked = {"since_s": since_s, "first_token_max_s": first_token_max_s, "read_max": read_max}
    whole: dict[EndpointGpu, Mapping[str, Any]] = {}
    tiers: defaultdict[EndpointGpu, dict[str, TierLatency]] = defaultdict(dict)
    for row in session.execute(_MEASURE, asked).mappings():
        key = EndpointGpu(model=row["model"], region=row["region"], gpu_type=row["gpu_type"])
        if row["tier"] is None:
            whole[key] = {name: value for name, value in row.items() if name not in _NOT_MEANS}
            continue
        p50_s, p95_s = row["ttft_quantiles_s"]
        tiers[key][row["tier"]] = TierLatency(requests=row["requests"], ttft_p50_s=p50_s, ttft_p95_s=p95_s)
    return {key: MeasuredLatency(**means, tiers=tiers[key]) for key, means in whole.items()}


def stated_latencies(session: Session) -> dict[ModelGpu, Json | None]:
    """The step times of all profiles as they are stated; None: a profile has none."""
    rows = session.execute(select(Profile.model, Profile.gpu_type, Profile.latency))
    return {ModelGpu(model=model, gpu_type=gpu_type): latency for model, gpu_type, latency in rows}


def put_comparisons(
    session: Session, compared: Mapping[EndpointGpu, tuple[MeasuredLatency, LatencyComparison]]
) -> None:
    """Write what an hourly run compared, in place of all of the run before."""
    session.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    session.execute(delete(LatencyComparisonRow))
    rows = [_values(key, measured, comparison) for key, (measured, comparison) in sorted(compared.items())]
    if rows:
        session.execute(insert(LatencyComparisonRow), rows)


def _values(key: EndpointGpu, measured: MeasuredLatency, comparison: LatencyComparison) -> dict[str, Any]:
    predicted = comparison.predicted
    return {
        "model": key.model,
        "region": key.region,
        "gpu_type": key.gpu_type,
        "requests": measured.requests,
        "ttft_s": measured.ttft_s,
        "predicted_ttft_s": None if predicted is None else _finite(predicted.ttft_s),
        "tbt_s": measured.tbt_s,
        "predicted_tbt_s": None if predicted is None else _finite(predicted.tbt_s),
        "batch": None if predicted is None else predicted.batch,
        "prefill_share": None if predicted is None else predicted.prefill_share,
        "prompt_tokens": measured.prompt_tokens,
        "context_tokens": measured.context_tokens,
        "tiers": {tier: asdict(each) for tier, each in sorted(measured.tiers.items())},
        "differs": comparison.differs,
        "reason": comparison.reason,
    }


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def comparisons(model: str | None = None, *, differing: bool = False) -> Select[LatencyComparisonRow]:
    """Those of the last two hours of a model, None: of all; with `differing` only where times are not as the profile
    says.
    """
    query = select(LatencyComparisonRow).where(LatencyComparisonRow.compared_at > func.now() - _KEPT)
    if model is not None:
        query = query.where(LatencyComparisonRow.model == model)
    return query.where(LatencyComparisonRow.differs) if differing else query


def drop_comparisons(session: Session, model: str, gpu_type: str) -> None:
    """A profile states something else: these were with what it stated before."""
    table = LatencyComparisonRow
    session.execute(delete(table).where(table.model == model, table.gpu_type == gpu_type))
