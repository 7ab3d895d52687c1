"""`metrics.md`: every Prometheus metric, from the registries that the processes expose."""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics import MetricWrapperBase

from controlplane.api.metrics import Metrics
from controlplane.api.system_metrics import SystemMetrics
from controlplane.policies.plan_explanations import ForecastRecord
from controlplane.policies.readiness import HealthFacts, choose_health
from controlplane.store.system_facts import PlanningFacts, QueueFacts, SystemFacts
from dataplane.agent.measures import RequestMeasures
from dataplane.agent.metrics import AgentCollector
from dataplane.agent.node import Agent
from dataplane.agent.settings import AgentSettings, WorkerSettings
from ops.reference.markdown import code, page, plain, table

_INTRODUCTION = """\
Gateways and node agents answer `GET /metrics` in Prometheus' text format, without a key: keep that path inside your
network. Dispatchers, workers, forecasters and beat expose no endpoint: they write when they last succeeded into
Postgres, and every gateway shows that as `tidepool_loop_last_success_timestamp_seconds` and `tidepool_loop_late`.
Boards, alerts and how to scrape are on [Monitoring](monitoring.md).

A counter has the suffix `_total`. A histogram has the samples `_bucket`, `_sum` and `_count`."""
_HEAD = ("metric", "type", "labels", "meaning")


def metrics_page() -> str:
    """The page."""
    return page(
        "Metrics",
        _INTRODUCTION,
        "## Gateways",
        "At the address of the API.",
        table(_HEAD, _rows(gateway_metrics())),
        "## The whole system",
        "Shown alike by every gateway, so take `max` over gateways, not `sum`. While Postgres is away, only"
        " `tidepool_ready`, `tidepool_server_away` and `tidepool_replica_age_seconds` are there. The last one,"
        " `tidepool_server_away`, and the terms are each gateway's own view.",
        table(_HEAD, _rows(system_metrics())),
        "## Node agents",
        "At the agent's own port. Names that begin with `vllm:` mean what they mean in vLLM. A slot is a worker,"
        " by its place in `TIDEPOOL_AGENT_SLOTS`.",
        table(_HEAD, _rows(agent_metrics())),
    )


def gateway_metrics() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """The metrics that a gateway counts, with the names of their labels."""
    return _described(vars(Metrics()).values())


def system_metrics() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """The metrics of the whole system, which every gateway shows, with the names of their labels."""
    queue = QueueFacts(open={}, finished={}, running=0, batches={}, at_risk=0, late_s=0.0)
    record = ForecastRecord(hours=0, covered=0, error_sum=0.0, actual_sum=0.0)
    planning = PlanningFacts(plan=None, cost_per_hour=None, waiting=0, record=record, quantile=0.0)
    facts = SystemFacts(nodes={}, gpus={}, instances={}, unplaced={}, latencies=(), queue=queue, planning=planning)
    for family in SystemMetrics(
        choose_health(HealthFacts(replica_age_s=0.0, term=0, reported_term=0)), (), facts
    ).collect():
        yield family, _labels(family)


def agent_metrics() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """The metrics of an agent with the names of their labels."""
    measures = RequestMeasures(CollectorRegistry())
    yield from _described(vars(measures).values())
    for family in measures.tokens.collect():
        yield family, _labels(family)
    settings = AgentSettings(
        node="node",
        region="region",
        gpu_type="cpu",
        slots=(WorkerSettings(memory_bytes=2**30, gpus=1, kind="auto"),),
        engine="torch",
        node_key="no secret",
    )
    for family in AgentCollector(Agent(settings, boot_id="reference")).collect():
        yield family, _labels(family)


def _described(candidates: Iterable[object]) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    for candidate in candidates:
        if isinstance(candidate, MetricWrapperBase):
            for family in candidate.collect():
                yield family, _labels(candidate)


def _labels(metric: Any) -> tuple[str, ...]:
    """The client library names a metric's labels in its samples only, and there are none yet."""
    return tuple(vars(metric)["_labelnames"])


def _rows(metrics: Iterable[tuple[Metric, tuple[str, ...]]]) -> Iterator[tuple[str, ...]]:
    for family, labels in metrics:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield code(name), family.type, ", ".join(map(code, labels)), plain(family.documentation)
