"""Compare the latency that requests had with what their profiles, as corrected, predict: each hour, before its plan."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from controlplane.planner.correct import first_of, profiles_in_force
from controlplane.policies.facts import EndpointGpu
from controlplane.policies.latency_comparison import ComparisonSettings, ReportedLoad, compare_latency
from controlplane.policies.step_correction import corrected_latency
from controlplane.settings import Settings
from controlplane.store.latency_comparisons import (
    READ_MAX,
    LatencyComparisonRow,
    comparisons,
    measure_latency,
    measured_since_s,
    put_comparisons,
    stated_latencies,
)
from controlplane.store.profile_corrections import read_loads
from controlplane.store.session import Database

_SPAN_S = 3600


def compare(
    database: Database, settings: Settings, *, now_s: float, read_max: int = READ_MAX
) -> dict[EndpointGpu, str]:
    """Compare the last hour of every endpoint with GPUs of its own, or as much of it as the newest `read_max` requests
    are of, and store it; returns the reasons of those whose times are not as their profiles say.
    """
    all_logged = settings.request_log == "all" and settings.request_log_sample >= 1
    first_token_max_s = None if all_logged else settings.request_log_slow_s
    how = ComparisonSettings(logged_share=settings.request_log_sample)
    with database.transaction(replicated=False) as session:
        since_s = measured_since_s(session, since_s=now_s - _SPAN_S, read_max=read_max)
        measured = measure_latency(session, since_s=since_s, first_token_max_s=first_token_max_s, read_max=read_max)
        loads = read_loads(session, since_s=since_s)
        steps = profiles_in_force(session, settings).steps
        latencies = stated_latencies(session)
        compared = {}
        for key, each in measured.items():
            if key.pair not in latencies:
                continue
            latency, (prefill, decode) = latencies[key.pair], steps.get(key.pair, (1.0, 1.0))
            if latency is not None:
                latency = corrected_latency(latency, prefill=prefill, decode=decode)
            compared[key] = each, compare_latency(each, loads.get(key, ReportedLoad()), latency, how)
        put_comparisons(session, compared)
    return {key: comparison.reason for key, (_, comparison) in compared.items() if comparison.differs}


def differing(session: Session) -> list[LatencyComparisonRow]:
    """The comparisons whose times are not as the profiles say, by model, region and GPU type."""
    rows = session.scalars(comparisons(differing=True))
    return sorted(rows, key=lambda row: (row.model, row.region, row.gpu_type))


def record(rows: Sequence[LatencyComparisonRow]) -> list[dict[str, Any]]:
    """As a plan stores them."""
    names = ("model", "region", "gpu_type", "requests", "ttft_s", "predicted_ttft_s", "tbt_s", "predicted_tbt_s")
    return [{name: getattr(row, name) for name in (*names, "reason")} for row in rows]


def summary(rows: Sequence[LatencyComparisonRow]) -> str:
    """In short; empty where all times are as the profiles say."""
    texts = [f"{row.model} in {row.region} on {row.gpu_type}" for row in rows]
    return f"latency is not what the profiles say of {first_of(texts)}" if texts else ""
