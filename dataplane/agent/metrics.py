"""The agent's metrics. Those that vLLM has too bear its names, which dashboards know; the others start by `tidepool_`.

What is counted by request is in `dataplane.agent.measures`; the rest is read from the agent at each scrape.
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
    """A metric of KV pressure. `values`: of a slot's statistics, by the value of `label`; `label_values`: other words
    for some of these.
    """

    make: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    about: str
    label: str
    values: Callable[[PoolStats], Mapping[str, int]]
    label_values: Mapping[str, str] = field(default_factory=dict)

    def former(self, name: str, label: str) -> "_Family":
        """The same family under its former name, which the next release no longer has."""
        return replace(self, name=name, label=label, about=f"Deprecated: {self.name}", label_values={})


_OFFLOADED = _Family(
    make=GaugeMetricFamily,
    name="tidepool_offloaded_weight_layers",
    about="Weight layers evicted to make room for KV cache",
    label="model_name",
    values=lambda pool: pool.given_up,
)
_EVENTS = _Family(
    make=CounterMetricFamily,
    name="tidepool_kv_pressure_events",
    about="Times that KV blocks ran out, by the action taken",
    label="action",
    values=lambda pool: pool.relief,
)
_DECLINED = _Family(
    make=CounterMetricFamily,
    name="tidepool_weight_offloads_declined",
    about="Times that KV blocks ran out and no weight layer was offloaded, by reason",
    label="reason",
    values=lambda pool: pool.not_remapped,
)
_MOVED = _Family(
    make=CounterMetricFamily,
    name="tidepool_weight_layers_moved",
    about="Weight layers offloaded for KV cache and reclaimed from it",
    label="direction",
    values=lambda pool: pool.layers_moved,
    label_values={"lent": "offloaded", "taken back": "reclaimed"},
)
_PRESSURE = (
    (_OFFLOADED, _OFFLOADED.former("tidepool_given_up_layers", "model_name")),
    (_EVENTS, _EVENTS.former("tidepool_kv_relief", "way")),
    (_DECLINED, _DECLINED.former("tidepool_not_remapped", "reason")),
    (_MOVED, _MOVED.former("tidepool_moved_layers", "way")),
)


class AgentCollector(Collector):
    """Turns an agent's present state into metric families."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._by_model()
        yield from self._by_node()
        yield from self._by_slot()
        yield from self._memory()
        yield from self._pressure()

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
        slots = self._agent.slots
        counts = (
            ("vllm:num_preemptions", "Requests preempted", sum(slot.preemptions_total for slot in slots)),
            ("tidepool_switches", "Model switches", self._agent.switches_total),
            ("tidepool_load_seconds", "Requests held up by another model's load", sum(slot.load_s for slot in slots)),
            ("tidepool_worker_restarts", "Worker processes replaced", sum(slot.restarts_total for slot in slots)),
            (
                "tidepool_handovers",
                "Requests handed from a prefill slot to a decode slot",
                sum(pool.dispatcher.handovers_total for pool in self._agent.pools),
            ),
        )
        for name, about, value in counts:
            yield CounterMetricFamily(name, about, value=value)
        cached = max((slot.stats.pool.host_cache_bytes for slot in slots if slot.stats.pool is not None), default=0)
        yield GaugeMetricFamily("tidepool_host_cache_bytes", "Models in host memory", value=cached)

    def _by_slot(self) -> Iterator[Metric]:
        labels = ["slot", "kind"]
        load = GaugeMetricFamily("tidepool_slot_load", "alpha; above 1 a slot cannot keep up", labels=labels)
        flying = GaugeMetricFamily("tidepool_requests_in_flight", "Requests on a slot", labels=labels)
        prefills = GaugeMetricFamily("tidepool_prefills_waiting", "Requests without a first token", labels=labels)
        start = GaugeMetricFamily(
            "tidepool_worker_start_seconds", "From the latest start of a worker until it could load", labels=labels
        )
        residents = GaugeMetricFamily("tidepool_resident_models", "Models with weights in the arena", labels=labels)
        unread = GaugeMetricFamily("tidepool_worker_unread_bytes", "Commands a worker has not read", labels=labels)
        for pool in self._agent.pools:
            for slot in pool.slots:
                values = [str(slot.index), slot.kind]
                load.add_metric(values, slot.load)
                flying.add_metric(values, pool.dispatcher.count(slot.index))
                prefills.add_metric(values, 0 if slot.stats.pool is None else slot.stats.pool.prefills_waiting)
                residents.add_metric(values, len(slot.stats.resident_models))
                start.add_metric(values, slot.worker_start_s)
                unread.add_metric(values, slot.unread_bytes)
        yield from (load, flying, prefills, residents, start, unread)

    def _memory(self) -> Iterator[Metric]:
        slabs = GaugeMetricFamily("tidepool_slabs", "Slabs of an arena, by what they hold", labels=["slot", "state"])
        kv = GaugeMetricFamily("tidepool_kv_bytes", "KV memory by shape", labels=["slot", "memory", "shape", "state"])
        for slot in self._agent.slots:
            if slot.stats.pool is None:
                continue
            for state, count in sorted(slot.stats.pool.slabs.items()):
                slabs.add_metric([str(slot.index), state], count)
            for memory, shapes in (("device", slot.stats.pool.kv), ("host", slot.stats.pool.host_kv)):
                for shape in shapes:
                    for state, value in _shape_bytes(shape):
                        kv.add_metric([str(slot.index), memory, shape.shape, state], value)
        yield from (slabs, kv)

    def _pressure(self) -> Iterator[Metric]:
        for new, old in _PRESSURE:
            for family in (new, old):
                made = family.make(family.name, family.about, labels=["slot", family.label])
                for slot in self._agent.slots:
                    values = {} if slot.stats.pool is None else new.values(slot.stats.pool)
                    for key, value in sorted(values.items()):
                        made.add_metric([str(slot.index), family.label_values.get(key, key)], value)
                yield made


def _shape_bytes(shape: KvShapeStats) -> tuple[tuple[str, int], ...]:
    return (("used", shape.used_bytes), ("held", shape.held_bytes), ("moving", shape.moving_bytes))


def agent_registry(agent: Agent) -> CollectorRegistry:
    """The agent's registry, with its present state in it. To be called once."""
    agent.registry.register(AgentCollector(agent))
    return agent.registry
