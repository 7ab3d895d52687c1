"""What a gateway's `/metrics` says of the whole system, from rows in Postgres; and with Postgres away."""

import math
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from sqlalchemy import delete, select, text

from controlplane.policies.facts import Endpoint, EndpointGpu
from controlplane.policies.latency_comparison import LatencyComparison, PredictedLatency
from controlplane.store.batch_tables import Batch, BatchCount
from controlplane.store.demand import IW, DemandRow, put_demand, put_forecasts, score_forecasts
from controlplane.store.endpoint_summary import note_outcome
from controlplane.store.latency_comparisons import put_comparisons
from controlplane.store.tables import Desired
from ops.local.ports import free_port
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.planner.test_compare import a_measurement
from tests.controlplane.planner.test_expected import a_forecast
from tests.controlplane.world import FakeAgent, World, until

Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(gateway: Gateway) -> Series:
    """All series. Where Postgres is there, what is read from it is waited for: a busy machine may need a second try."""
    texts: list[str] = []

    def is_complete() -> bool:
        answer = gateway.http.get("/metrics")
        assert answer.status_code == 200
        texts.append(answer.text)
        return 'server_away{server="postgres"} 1.0' in answer.text or "tidepool_plan_in_force" in answer.text

    until(is_complete)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(texts[-1])
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float | None:
    return series.get((f"tidepool_{name}", frozenset(labels.items())))


def test_nodes_gpus_and_instances(world: World) -> None:
    world.join("pool")
    world.join("lost")
    world.place("lost")
    world.place("pool", desired=Desired.SPOT, slot=1)
    shared = world.place("pool")
    with world.database.transaction() as session:
        session.execute(text("UPDATE instances SET pooled = true, gpus = 0 WHERE id = :id"), {"id": shared})
        session.execute(text("UPDATE nodes SET last_seen_at = now() - interval '1 day' WHERE name = 'lost'"))
        rows = [{"gpu_type": None, "count": 2, "reason": "full"}, {"gpu_type": "H800", "count": 1, "reason": "full"}]
        note_outcome(session, settled={}, unplaced={Endpoint(model="tide", region="us-west"): rows})
    with running_gateway(world, FakeAgent()) as gateway:
        series = scraped(gateway)
    assert value(series, "ready") == 1
    assert value(series, "server_away", server="postgres") == value(series, "server_away", server="redis") == 0
    assert value(series, "nodes", region="us-east", state="alive") == 2
    assert value(series, "nodes", region="us-east", state="lost") == 1
    gpus = {
        state: value(series, "gpus", region="us-east", gpu_type="H800", state=state)
        for state in ("dedicated", "pooled", "spot", "free", "lost")
    }
    assert gpus == {"dedicated": 1, "pooled": 2, "spot": 1, "free": 4, "lost": 4}
    assert value(series, "instances", model="tide", region="us-east", state="lost") == 1
    assert value(series, "instances", model="tide", region="us-east", state="pending") == 3
    assert value(series, "unplaced_instances", model="tide", region="us-west") == 3
    assert value(series, "loop_late", loop="plan") == 0


def test_latency_beside_what_the_profile_predicts(world: World) -> None:
    """An infinite or unknown time is no sample."""
    predicted = PredictedLatency(ttft_s=math.inf, tbt_s=0.02, batch=2.0, prefill_share=1.1, prefill_share_max=1.1)
    comparison = LatencyComparison(predicted=predicted, differs=True, reason="decode is slower")
    at = EndpointGpu(model="tide", region="us-east", gpu_type="H800")
    with world.database.transaction() as session:
        put_comparisons(session, {at: (a_measurement(), comparison)})
    with running_gateway(world, FakeAgent()) as gateway:
        series = scraped(gateway)
    labels = {"model": "tide", "region": "us-east", "gpu_type": "H800"}
    assert value(series, "latency_measured_seconds", **labels, kind="ttft") == 0.12
    assert value(series, "latency_measured_seconds", **labels, kind="tbt") == 0.04
    assert value(series, "latency_predicted_seconds", **labels, kind="tbt") == 0.02
    assert value(series, "latency_predicted_seconds", **labels, kind="ttft") is None
    assert value(series, "latency_differs", **labels) == 1


def test_queue(world: World) -> None:
    batch = world.add_batch(lines=5)
    with world.database.transaction() as session:
        session.execute(text("UPDATE queued_requests SET lease_until = now() + interval '1 hour' WHERE line <= 2"))
        session.execute(text("UPDATE batches SET at_risk = true, predicted_end_at = deadline_at + interval '90 s'"))
        ended = {"part": 0, "completed": 3, "failed": 0, "input_tokens": 1, "output_tokens": 1}
        number = session.scalars(select(Batch.number).where(Batch.id == batch)).one()
        session.add(BatchCount(batch_number=number, model="tide", **ended))
    with running_gateway(world) as gateway:
        series = scraped(gateway)
        with world.database.transaction() as session:
            session.execute(delete(BatchCount))
        assert value(scraped(gateway), "batch_requests_finished_total", model="tide") == 0, "so that a rate is known"
    assert value(series, "batch_requests_open", model="tide") == 2
    assert value(series, "batch_requests_finished_total", model="tide") == 3
    assert value(series, "batch_requests_running") == 2
    assert value(series, "batches_open", state="in_progress") == 1
    assert value(series, "batches_at_risk") == 1
    assert value(series, "batch_predicted_late_seconds") == 90


def test_planning(world: World) -> None:
    with running_gateway(world) as gateway:
        series = scraped(gateway)
        assert (value(series, "plan_in_force"), value(series, "plan_cost_per_hour")) == (0, None)
        assert value(series, "plan_objective_per_hour") is None
        assert (value(series, "forecast_hours_scored"), value(series, "forecast_coverage_ratio")) == (0, None)
        unserved: list[Any] = [{"region": "us-east"}]
        shared = {"region": "us-east", "gpu_type": "H800", "worker_gpus": 1, "before": 0, "after": 3, "pooled": []}
        planned: dict[str, Any] = {"unserved": unserved, "pools": [shared]}
        world.in_force((("tide", "us-east", 2),), objective_per_hour=56_529.0, gap=0.01, **planned)
        score_two_of_three(world)
        series = scraped(gateway)
    assert (value(series, "plan_in_force"), value(series, "plans_waiting")) == (1, 0)
    assert value(series, "plan_window_start_timestamp_seconds") == 3600
    assert value(series, "plan_cost_per_hour") == (2 + 3) * 2.0, "what is not served costs nothing"
    assert (value(series, "plan_objective_per_hour"), value(series, "plan_gap_ratio")) == (56_529, 0.01)
    assert (value(series, "plan_solve_seconds"), value(series, "plan_unserved")) == (0.1, 1)
    assert value(series, "forecast_quantile") == world.settings.forecast_quantile
    assert value(series, "forecast_hours_scored") == 3
    assert value(series, "forecast_coverage_ratio") == 2 / 3
    assert value(series, "forecast_error_ratio") == 5.5 / 30


def score_two_of_three(world: World) -> None:
    """Three hours of which one, of 10 tokens/s, came above its forecast; the last hour is not over."""
    now_s = int(time.time()) // 60 * 60
    origins = [now_s - hours * 3600 - 600 for hours in (4, 3, 2)]
    east = Endpoint(model="tide", region="us-east")
    minutes = range(origins[0], now_s, 60)
    with world.database.transaction() as session:
        put_demand(session, [DemandRow(endpoint=east, kind=IW, start_s=at, tokens_per_s=10.0) for at in minutes])
        forecasts = [a_forecast(east, at, peak) for at, peak in zip(origins, (20.0, 17.0, 12.0), strict=True)]
        forecasts[2].peak_upper = 9.0
        put_forecasts(session, [*forecasts, a_forecast(east, now_s - 600, 1.0)])
        assert score_forecasts(session, now_s=now_s) == 3
        assert score_forecasts(session, now_s=now_s) == 0, "a score is final"


def test_without_postgres_only_what_needs_none(world: World) -> None:
    away: Any = SecretStr(f"postgresql+psycopg://127.0.0.1:{free_port()}/0")
    with running_gateway(world, database_url=away) as gateway:
        series = scraped(gateway)
    assert (value(series, "ready"), value(series, "server_away", server="postgres")) == (0, 1)
    assert value(series, "server_away", server="redis") == 0
    assert {
        name for name, _ in series if name.startswith(("tidepool_plan", "tidepool_nodes", "tidepool_loop"))
    } == set()
