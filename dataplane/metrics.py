"""The agent's metrics, read from it at each scrape. Engine metrics have vLLM's names, which dashboards know."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dataplane.messages import InstanceReport
from dataplane.node import Agent


class AgentCollector(Collector):
    """Turns an agent's present state into metric families."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        """All families, one sample a model."""
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
        prompt = CounterMetricFamily("vllm:prompt_tokens", "Prompt tokens admitted", labels=["model_name"])
        for model, tokens in sorted(self._agent.prompt_tokens_total.items()):
            prompt.add_metric([model], tokens)
        made = CounterMetricFamily("vllm:generation_tokens", "Tokens streamed", labels=["model_name"])
        for model, tokens in sorted(self._agent.generation_tokens_total.items()):
            made.add_metric([model], tokens)
        yield from (prompt, made)
        yield CounterMetricFamily("tidepool_switches", "Model switches", value=self._agent.switches_total)
        restarts = sum(slot.restarts_total for slot in self._agent.slots)
        yield CounterMetricFamily("tidepool_worker_restarts", "Worker processes replaced", value=restarts)


def agent_registry(agent: Agent) -> CollectorRegistry:
    """A registry of this agent alone."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(agent))
    return registry
