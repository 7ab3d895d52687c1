"""Metrics of a gateway, with the names of Prometheus and OpenTelemetry conventions."""

import functools
from collections.abc import Callable, Container, Iterable, Iterator
from enum import StrEnum
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from controlplane.errors import CapacityError, TidepoolError
from controlplane.policies.limits import Limit
from controlplane.store.request_log import CANCELLED, OK
from dataplane.protocol.errors import DataplaneError
from dataplane.protocol.messages import Finished
from dataplane.protocol.tiers import Tier

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)

_STAGE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 10, 60)

_OTHER_CODES = frozenset({"chat_template_failed", "gateway_busy", "host_memory_full", "invalid_node_key"})
"""Codes that are in no tree of errors that this process knows."""
_UNKNOWN_OUTCOME = "other"
_TOO_MANY = 429


class Stage(StrEnum):
    """A stage of a request before its first token: its key is checked and its body arrives; its body is read; its
    messages to nodes are made; its tenant's limits are charged, if it has any; it is admitted; a node has it.
    """

    RECEIVE = "receive"
    CHECK = "check"
    PREPARE = "prepare"
    LIMITS = "limits"
    ADMIT = "admit"
    PLACE = "place"


Family = TypeVar("Family", Counter, Histogram)


class Metrics:
    """The metrics of a process. Those of the whole system are in `controlplane.api.system_metrics`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._series: dict[tuple[Counter | Histogram, tuple[str, ...]], Counter | Histogram] = {}
        """By family and labels, of which the first is the model."""
        self._expected: set[str] = set()
        own = ("model", "tier")
        self.requests = self._counter("requests", "Requests by how they ended.", *own, "region", "outcome")
        self.refusals = self._counter("refusals", "Requests refused for lack of capacity.", *own, "reason")
        self.continuations = self._counter("continuations", "Streams that continued on another instance.", *own)
        self.reroutes = self._counter("reroutes", "Requests that left a queue for an idle instance.", *own)
        self.input_tokens = self._counter("input_tokens", "Prompt tokens served.", *own)
        self.cached_input_tokens = self._counter(
            "cached_input_tokens", "Prompt tokens served from prefix caches.", *own
        )
        self._count_by_instance()
        self.output_tokens = self._counter("output_tokens", "Completion tokens served.", *own)
        self.slo_tokens = self._counter("slo_tokens", "Tokens by whether they were on time.", *own, "met")
        self.slo_requests = self._counter("slo_requests", "Answers by whether they met the objectives.", *own, "met")
        self.slo_violations = self._counter(
            "slo_violations", "Answers that missed an objective: ttft, tbt, or failed.", *own, "objective"
        )
        self.first_token_s = self._histogram(
            "gen_ai_server_time_to_first_token_seconds", "From the request's arrival to its first token.", _SECONDS
        )
        self.per_token_s = self._histogram(
            "gen_ai_server_time_per_output_token_seconds", "Mean time between a request's tokens.", _SECONDS
        )
        self.duration_s = self._histogram(
            "gen_ai_server_request_duration_seconds", "From the request's arrival to its end.", _LONG_SECONDS
        )
        self._measure_stages()
        self._limit_refusals = self._counter("limit_refusals", "Requests refused by a tenant's limit.", "limit")
        for limit in Limit:
            self._limit_refusals.labels(limit.value)
        self._limit_refused_tokens = self._counter(
            "limit_refused_input_tokens",
            "Input tokens, as demand estimates them, of requests refused by a tenant's limit; they are not in demand.",
            "model",
            "limit",
        )
        self.limits_local = self._gauge("limits_local", "1 while limits are counted in this process alone.")
        self.budget_refusals = self._counter("budget_refusals", "Requests refused by a tenant's budget of tokens.")
        self.alias_requests = self._counter(
            "alias_requests", "Requests that asked for an alias, by the model that they got.", "model", "alias"
        )
        self.limit_shares = self._gauge("limit_shares", "Shares of tenants' limits that the region has.")
        self.limit_share_failures = self._counter(
            "limit_share_failures", "Times that shares of limits could not be read or renewed."
        )
        self.request_log_dropped = self._counter(
            "request_log_dropped", "Request records dropped because Postgres was unavailable or too slow."
        )
        self.streams = self._gauge("streams", "Requests that are being answered.")
        self._flex_waiting = self._gauge("flex_waiting", "Flex requests that wait for spare capacity.")

    def _measure_stages(self) -> None:
        self._stage_s = Histogram(
            "tidepool_request_stage_seconds",
            "Stages of a request before its first token: receive, check, prepare, limits, admit, place.",
            ("stage",),
            buckets=_STAGE_SECONDS,
            registry=self._registry,
        )
        self._stages = {stage: self._stage_s.labels(stage.value) for stage in Stage}

    def _count_by_instance(self) -> None:
        by_instance = ("model", "instance")
        self._instance_input = self._counter("instance_input_tokens", "Prompt tokens by instance.", *by_instance)
        self._instance_cached = self._counter(
            "instance_cached_input_tokens", "Prompt tokens that an instance had cached.", *by_instance
        )

    def series(self, family: Family, *labels: str) -> Family:
        """The series of a family with these labels. It is kept, since the library's own way to find it takes a lock."""
        found = self._series.get((family, labels))
        if found is None:
            found = self._series[family, labels] = family.labels(*labels)
        return found  # type: ignore[return-value]

    def expect(self, models: Iterable[str]) -> None:
        """Begin the counters of models that alerts read, at 0: the event that a series begins with is in no rate and no
        increase. All series of other models are dropped: adapters of a training run would leave some behind each.
        """
        now = set(models)
        for model in now - self._expected:
            for family, labels in self._read_by_alerts(model):
                self.series(family, *labels)
        self._expected = now
        self._drop(key for key in self._series if key[1][0] not in now)

    def _read_by_alerts(self, model: str) -> Iterator[tuple[Counter, tuple[str, ...]]]:
        """Families and labels of a model's series that alerts read; none is of deferred requests."""
        for tier in (Tier.IW_F, Tier.IW_N):
            yield from ((self.refusals, (model, tier, reason)) for reason in _refusal_reasons())
            yield from ((self.slo_requests, (model, tier, met)) for met in ("true", "false"))

    def _drop(self, keys: Iterable[tuple[Counter | Histogram, tuple[str, ...]]]) -> None:
        for family, labels in list(keys):
            family.remove(*labels)
            del self._series[family, labels]

    def note_stage(self, stage: Stage, seconds: float) -> None:
        self._stages[stage].observe(seconds)

    def note_reroute(self, model: str, tier: str) -> None:
        self.series(self.reroutes, model, tier).inc()

    def note_limit_refusal(self, limit: Limit, *, model: str | None, input_tokens: int) -> None:
        """Count a request that a limit refused. `model`: None of uploads and new batches, which have no tokens."""
        self._limit_refusals.labels(limit.value).inc()
        if model is not None:
            self.series(self._limit_refused_tokens, model, limit.value).inc(input_tokens)

    def note_prompt(self, model: str, instance: str, end: Finished) -> None:
        """Count the prompt of an answer for its instance."""
        self.series(self._instance_input, model, instance).inc(end.prompt_tokens)
        self.series(self._instance_cached, model, instance).inc(end.cached_tokens)

    def keep_instances(self, present: Container[str]) -> None:
        """Drop the counts of instances that are gone."""
        families = {self._instance_input, self._instance_cached}
        self._drop(key for key in self._series if key[0] in families and key[1][1] not in present)

    def watch_flex(self, waiting: Callable[[], int]) -> None:
        """Read the number of waiting flex requests from `waiting` at every scrape."""
        self._flex_waiting.set_function(waiting)

    def render(self) -> bytes:
        """The process's metrics in Prometheus's exposition format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"tidepool_{name}", about, labels, registry=self._registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"tidepool_{name}", about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, about, ("model", "tier"), buckets=buckets, registry=self._registry)


def outcome_label(outcome: str) -> str:
    """How a request ended, as a label: codes that a node has made up are one, since each value is a series for ever."""
    return outcome if outcome in _known_outcomes() else _UNKNOWN_OUTCOME


@functools.cache
def _known_outcomes() -> frozenset[str]:
    return frozenset({OK, CANCELLED, *_codes(TidepoolError), *_codes(DataplaneError)}) | _OTHER_CODES


@functools.cache
def _refusal_reasons() -> tuple[str, ...]:
    """How a request may be refused for lack of capacity or by a limit."""
    kinds = [*_kinds(TidepoolError), *_kinds(DataplaneError)]
    return tuple(sorted({kind.code for kind in kinds if kind.status == _TOO_MANY or issubclass(kind, CapacityError)}))


def _codes(kind: type[TidepoolError] | type[DataplaneError]) -> set[str]:
    """The codes of a kind of errors and of all kinds of it."""
    return {each.code for each in _kinds(kind)}


def _kinds(kind: type[TidepoolError] | type[DataplaneError]) -> Iterator[type[TidepoolError] | type[DataplaneError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)
