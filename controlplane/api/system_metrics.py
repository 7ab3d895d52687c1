"""Metrics of the whole system, read from Postgres at each scrape: every gateway shows the same. While Postgres is away
there are none but `tidepool_ready`, `tidepool_server_away` and `tidepool_replica_age_seconds`, this gateway's own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.policies.readiness import Health, HealthStatus, LoopFacts
from controlplane.store.latency_comparisons import LatencyComparisonRow
from controlplane.store.system_facts import PlanningFacts, QueueFacts, SystemFacts

_SERVERS = ("postgres", "replica", "redis")


class SystemMetrics(Collector):
    """Turns what one scrape read into metric families. `facts`: None while Postgres is away."""

    def __init__(self, verdict: Health, loops: tuple[LoopFacts, ...], facts: SystemFacts | None) -> None:
        self._verdict, self._loops, self._facts = verdict, loops, facts

    def collect(self) -> Iterator[Metric]:
        verdict = self._verdict
        ready = verdict.status != HealthStatus.UNAVAILABLE
        yield _gauge("ready", "1 while this gateway can serve, as /readyz says.", float(ready))
        away = {(server,): float(server in verdict.away) for server in _SERVERS}
        yield _gauges("server_away", "1 while a server does not answer this gateway.", away.items(), "server")
        if verdict.replica_age_s is not None:
            text = "How far the region's copy of the database may be behind."
            yield _gauge("replica_age_seconds", text, verdict.replica_age_s)
        if verdict.term is not None:
            yield _gauge("term", "The term of the primary, which each promotion raises.", verdict.term)
            text = "The newest term that nodes reported when it was newer than the primary's; 0: none was."
            yield _gauge("reported_term", text, verdict.reported_term)
        yield from self._loop_metrics()
        if self._facts is not None:
            yield from _fleet(self._facts)
            yield from _latencies(self._facts.latencies)
            yield from _queue(self._facts.queue)
            yield from _planning(self._facts.planning)

    def _loop_metrics(self) -> Iterator[Metric]:
        success = {(f.loop.value,): f.last_success_s for f in self._loops if f.last_success_s is not None}
        late = {(facts.loop.value,): float(facts.loop in self._verdict.late) for facts in self._loops}
        yield _gauges(
            "loop_last_success_timestamp_seconds", "Unix time of a loop's last success.", success.items(), "loop"
        )
        yield _gauges("loop_late", "1 while a loop has not succeeded for too long.", late.items(), "loop")


def render_system(metrics: SystemMetrics) -> bytes:
    """The metrics in Prometheus's exposition format."""
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry)


def _fleet(facts: SystemFacts) -> Iterator[Metric]:
    of_gpu, of_instance = ("region", "gpu_type", "state"), ("model", "region", "state")
    nodes = "Nodes: alive, draining, leaving, silent (drained, shut down or never heard of), or lost."
    yield _gauges("nodes", nodes, facts.nodes.items(), "region", "state")
    gpus = "GPUs: dedicated, pooled, spot, free, or lost with their node."
    yield _gauges("gpus", gpus, facts.gpus.items(), *of_gpu)
    yield _gauges("instances", "Instances that are not stopped.", facts.instances.items(), *of_instance)
    yield _gauges("unplaced_instances", "Instances that have no place.", facts.unplaced.items(), "model", "region")


def _latencies(rows: Sequence[LatencyComparisonRow]) -> Iterator[Metric]:
    at = ("model", "region", "gpu_type")
    keyed = [((row.model, row.region, row.gpu_type), row) for row in rows]

    def times(of: str) -> list[tuple[tuple[str, ...], float]]:
        named = (((*key, kind), getattr(row, f"{of}{kind}_s")) for key, row in keyed for kind in ("ttft", "tbt"))
        return [(labels, value) for labels, value in named if value is not None]

    text = "Mean time of an hour's requests to the first token after a node had them (ttft), and between tokens (tbt)."
    yield _gauges("latency_measured_seconds", text, times(""), *at, "kind")
    text = "The same times by the corrected profile, at the load there was."
    yield _gauges("latency_predicted_seconds", text, times("predicted_"), *at, "kind")
    text = "1 while the time between tokens is not what the corrected profile says."
    yield _gauges("latency_differs", text, [(key, float(row.differs)) for key, row in keyed], *at)


def _queue(facts: QueueFacts) -> Iterator[Metric]:
    yield _gauges("batch_requests_open", "Batch requests without a result.", _of(facts.open), "model")
    finished = CounterMetricFamily("tidepool_batch_requests_finished", "Batch requests completed.", labels=["model"])
    for model, count in sorted(facts.finished.items()):
        finished.add_metric([model], count)
    yield finished
    yield _gauge("batch_requests_running", "Batch requests that a dispatcher holds.", facts.running)
    yield _gauges("batches_open", "Batches that have not ended.", _of(facts.batches), "state")
    yield _gauge("batches_at_risk", "Batches in progress that are predicted to miss their deadline.", facts.at_risk)
    yield _gauge(
        "batch_predicted_late_seconds",
        "The longest time by which a batch is predicted to miss its deadline.",
        facts.late_s,
    )


def _planning(facts: PlanningFacts) -> Iterator[Metric]:
    plan, record = facts.plan, facts.record
    yield _gauge("plan_in_force", "1 while a plan is in force.", float(plan is not None))
    yield _gauge("plans_waiting", "Plans that wait for an operator's approval.", facts.waiting)
    hour = None if plan is None else plan.window_start_s
    yield _gauge("plan_window_start_timestamp_seconds", "Unix time of the hour that the plan in force is for.", hour)
    cost = "The price of the GPUs that the plan in force gives to instances and pools."
    yield _gauge("plan_cost_per_hour", cost, facts.cost_per_hour)
    objective = None if plan is None else plan.objective_per_hour
    text = "What the solver made small: that price, starts, and the prices of what is not kept."
    yield _gauge("plan_objective_per_hour", text, objective)
    gap = None if plan is None else plan.gap
    yield _gauge("plan_gap_ratio", "How far the plan in force may be from the optimum, as a share of 1.", gap)
    solve_s = None if plan is None else plan.solve_time_s
    yield _gauge("plan_solve_seconds", "How long the plan in force took to solve.", solve_s)
    unserved = None if plan is None else len(plan.unserved)
    yield _gauge("plan_unserved", "Demands that the plan in force does not serve in full.", unserved)
    yield _gauge("forecast_quantile", "The share of peaks that forecasts shall cover, of 1.", facts.quantile)
    yield _gauge("forecast_hours_scored", "Hours of series forecast in the last day and known since.", record.hours)
    coverage = record.covered / record.hours if record.hours else None
    yield _gauge("forecast_coverage_ratio", "The share of them whose peak stayed within its forecast, of 1.", coverage)
    error = record.error_sum / record.actual_sum if record.actual_sum else None
    yield _gauge("forecast_error_ratio", "Their error as a share of the demand's peaks.", error)


def _of(counts: Mapping[str, int]) -> Iterator[tuple[tuple[str], int]]:
    yield from (((name,), count) for name, count in counts.items())


def _gauge(name: str, about: str, value: float | None) -> Metric:
    """A gauge without labels; None: it has no value."""
    return _gauges(name, about, () if value is None else (((), value),))


def _gauges(name: str, about: str, values: Iterable[tuple[tuple[str, ...], float]], *labels: str) -> Metric:
    family = GaugeMetricFamily(f"tidepool_{name}", about, labels=labels)
    for key, value in sorted(values):
        family.add_metric(key, value)
    return family
