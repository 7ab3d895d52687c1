"""The agent's metrics. Those that vLLM also has keep its names, for dashboards; the others start with `tidepool_`.

Requests are counted in `dataplane.agent.measures`; the metrics here are read from the agent at each scrape.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dataplane.agent.node import Agent
from dataplane.engines.interface import KvShapeStats, PoolStats
from dataplane.protocol.messages import InstanceReport


@dataclass(frozen=True, kw_only=True)
class _Family:
    """A metric of KV memory. `values`: from a worker's statistics, by the value of `label`; `label_values`: other
    names for some of these.
    """

    make: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    about: str
    label: str
    values: Callable[[PoolStats], Mapping[str, int]]
    label_values: Mapping[str, str] = field(default_factory=dict)

    def former(self, name: str, label: str, label_values: Mapping[str, str] | None = None) -> "_Family":
        """The same family under its former name, which the next release no longer has."""
        return replace(self, name=name, label=label, about=f"Deprecated: {self.name}", label_values=label_values or {})


_OFFLOADED = _Family(
    make=GaugeMetricFamily,
    name="tidepool_offloaded_weight_layers",
    about="Weight layers evicted to make room for KV cache",
    label="model_name",
    values=lambda pool: pool.offloaded_layers,
)
_EVENTS = _Family(
    make=CounterMetricFamily,
    name="tidepool_kv_pressure_events",
    about="Times that KV blocks ran out, by the action taken",
    label="action",
    values=lambda pool: pool.pressure_actions,
)
_DECLINED = _Family(
    make=CounterMetricFamily,
    name="tidepool_weight_offloads_declined",
    about="Times that KV blocks ran out and no weight layer was offloaded, by reason",
    label="reason",
    values=lambda pool: pool.offloads_declined,
)
_MOVED = _Family(
    make=CounterMetricFamily,
    name="tidepool_weight_layers_moved",
    about="Weight layers offloaded for KV cache and reclaimed from it",
    label="direction",
    values=lambda pool: pool.layers_moved,
)
_IMPORTS = _Family(
    make=CounterMetricFamily,
    name="tidepool_kv_imports",
    about="Requests whose KV a prefill worker computed, by what the decode worker's copy of it waited for",
    label="waited_for",
    values=lambda pool: pool.kv_imports,
)
_PRESSURE = (
    (_OFFLOADED, _OFFLOADED.former("tidepool_given_up_layers", "model_name")),
    (_EVENTS, _EVENTS.former("tidepool_kv_relief", "way")),
    (_DECLINED, _DECLINED.former("tidepool_not_remapped", "reason")),
    (_MOVED, _MOVED.former("tidepool_moved_layers", "way", {"offloaded": "lent", "reclaimed": "taken back"})),
)


class AgentCollector(Collector):
    """Turns an agent's present state into metric families."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        yield from self._by_model()
        yield from self._by_node()
        yield from self._by_worker()
        yield from self._prefixes()
        yield from self._memory()
        yield from self._pressure()
        yield self._family(_IMPORTS, _IMPORTS)

    def _by_model(self) -> Iterator[Metric]:
        by_model: dict[str, list[InstanceReport]] = {}
        for report in self._agent.reports():
            by_model.setdefault(report.model, []).append(report)
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests in step batches", labels=["model_name"])
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests waiting", labels=["model_name"])
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV in use, as a share of 1", labels=["model_name"])
        for model, reports in sorted(by_model.items()):
            running.add_metric([model], sum(report.running for report in reports))
            waiting.add_metric([model], sum(report.waiting for report in reports))
            capacity = sum(report.kv_capacity_bytes for report in reports)
            used = sum(report.kv_used_bytes for report in reports)
            usage.add_metric([model], used / capacity if capacity else 0.0)
        yield from (running, waiting, usage)

    def _by_node(self) -> Iterator[Metric]:
        workers, former = self._agent.workers, self._agent.groups.former
        preemptions = former["preemptions"] + sum(w.preemptions_total for w in workers)
        load_s = former["load_s"] + sum(w.load_s for w in workers)
        restarts = former["restarts"] + sum(w.restarts_total for w in workers)
        handovers = former["handovers"] + sum(group.dispatcher.handovers_total for group in self._agent.groups)
        counts = (
            ("vllm:num_preemptions", "Requests preempted", preemptions),
            (
                "tidepool_switches",
                "Changes of the running model, also to one that is loaded already",
                self._agent.switches_total,
            ),
            ("tidepool_load_seconds", "Requests paused by another model's load", load_s),
            ("tidepool_worker_restarts", "Worker processes that died and were restarted", restarts),
            ("tidepool_handovers", "Requests whose KV moved from a prefill worker to a decode worker", handovers),
        )
        for name, about, value in counts:
            yield CounterMetricFamily(name, about, value=value)
        pools = [worker.stats.pool for worker in workers if worker.stats.pool is not None]
        cached = max((pool.host_cache_bytes for pool in pools), default=0)
        yield GaugeMetricFamily("tidepool_host_cache_bytes", "Models in host memory", value=cached)
        about = "The newest term of the control plane's primary that the node has seen; 0: none"
        yield GaugeMetricFamily("tidepool_node_term", about, value=self._agent.term)

    def _by_worker(self) -> Iterator[Metric]:
        labels = ["slot", "kind"]
        load = GaugeMetricFamily("tidepool_slot_load", "alpha; above 1 a worker cannot keep up", labels=labels)
        in_flight = GaugeMetricFamily("tidepool_requests_in_flight", "Requests on a worker", labels=labels)
        prefills = GaugeMetricFamily("tidepool_prefills_waiting", "Requests without a first token", labels=labels)
        start = GaugeMetricFamily(
            "tidepool_worker_start_seconds", "From the latest start of a worker until it could load", labels=labels
        )
        residents = GaugeMetricFamily("tidepool_resident_models", "Models with weights in the arena", labels=labels)
        unread = GaugeMetricFamily("tidepool_worker_unread_bytes", "Commands that a worker has not read", labels=labels)
        for group in self._agent.groups:
            for worker in group.workers:
                values = [str(worker.index), worker.kind]
                load.add_metric(values, worker.load)
                in_flight.add_metric(values, group.dispatcher.count(worker.index))
                prefills.add_metric(values, 0 if worker.stats.pool is None else worker.stats.pool.prefills_waiting)
                residents.add_metric(values, len(worker.stats.resident_models))
                start.add_metric(values, worker.worker_start_s)
                unread.add_metric(values, worker.unread_bytes)
        yield from (load, in_flight, prefills, residents, start, unread)

    def _prefixes(self) -> Iterator[Metric]:
        labels = ["model_name", "slot"]
        queries = CounterMetricFamily("vllm:prefix_cache_queries", "Prompt tokens prefilled", labels=labels)
        hits = CounterMetricFamily("vllm:prefix_cache_hits", "Prompt tokens whose KV was cached", labels=labels)
        for worker in self._agent.workers:
            for family, tokens in (
                (queries, worker.stats.prefix_query_tokens),
                (hits, worker.stats.prefix_hit_tokens),
            ):
                for model, count in sorted(tokens.items()):
                    family.add_metric([model, str(worker.index)], count)
        yield from (queries, hits)

    def _memory(self) -> Iterator[Metric]:
        slabs = GaugeMetricFamily("tidepool_slabs", "Slabs of an arena, by what they hold", labels=["slot", "state"])
        kv = GaugeMetricFamily("tidepool_kv_bytes", "KV memory by shape", labels=["slot", "memory", "shape", "state"])
        for worker in self._agent.workers:
            if worker.stats.pool is None:
                continue
            for state, count in sorted(worker.stats.pool.slabs.items()):
                slabs.add_metric([str(worker.index), state], count)
            for memory, shapes in (("device", worker.stats.pool.kv), ("host", worker.stats.pool.host_kv)):
                for shape in shapes:
                    for state, value in _shape_bytes(shape):
                        kv.add_metric([str(worker.index), memory, shape.shape, state], value)
        yield from (slabs, kv)

    def _pressure(self) -> Iterator[Metric]:
        for new, old in _PRESSURE:
            for family in (new, old):
                yield self._family(family, new)

    def _family(self, family: _Family, current: _Family) -> Metric:
        """A family, which has the values of the `current` one under other names."""
        made = family.make(family.name, family.about, labels=["slot", family.label])
        for worker in self._agent.workers:
            values = {} if worker.stats.pool is None else current.values(worker.stats.pool)
            for key, value in sorted(values.items()):
                made.add_metric([str(worker.index), family.label_values.get(key, key)], value)
        return made


def _shape_bytes(shape: KvShapeStats) -> tuple[tuple[str, int], ...]:
    return (
        ("used", shape.used_bytes),
        ("cached", shape.cached_bytes),
        ("held", shape.held_bytes),
        ("moving", shape.moving_bytes),
    )


def agent_registry(agent: Agent) -> CollectorRegistry:
    """The agent's registry with a collector of its present state. To be called once."""
    agent.registry.register(AgentCollector(agent))
    return agent.registry
