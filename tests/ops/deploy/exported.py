"""What the processes export: the samples of every metric with their type and the names of their labels."""

from dataclasses import dataclass
from functools import cache

from ops.reference.metrics import agent_metrics, gateway_metrics, system_metrics

GATEWAY, AGENT = "tidepool-gateway", "tidepool-agent"
TARGET_LABELS = {GATEWAY: {"job", "instance", "process"}, AGENT: {"job", "instance", "region"}}
"""Labels of targets, as `ops/deploy/prometheus.yaml` sets them; `process`: of gateways that share a port."""
_SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",), "gauge": ("",)}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The samples of one name."""

    type: str
    labels: frozenset[str]


@cache
def exported() -> dict[str, Sample]:
    """By name, samples of gateways and agents, and those that Prometheus itself makes."""
    own = {
        "up": Sample(type="gauge", labels=frozenset({"job", "instance"})),
        "ALERTS": Sample(type="gauge", labels=frozenset({"alertname", "alertstate", "severity"})),
    }
    for job, families in (
        (GATEWAY, (*gateway_metrics(), *system_metrics())),
        (AGENT, tuple(agent_metrics())),
    ):
        for family, labels in families:
            if "Deprecated" in family.documentation:
                continue
            for suffix in _SUFFIXES[family.type]:
                names = {*labels, *TARGET_LABELS[job], *(("le",) if suffix == "_bucket" else ())}
                kind = "counter" if suffix else "gauge"
                own[family.name + suffix] = Sample(type=kind, labels=frozenset(names))
    return own
