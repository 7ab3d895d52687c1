"""Endpoints for tests of scaling."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint
from controlplane.policies.scaling.choose import choose_scaling
from controlplane.policies.scaling.facts import (
    EndpointScaleFacts,
    KindFacts,
    ScalingDecision,
    ScalingFacts,
    ScalingSettings,
)
from dataplane.protocol.tiers import InstanceKind

HERE = Endpoint(model="m", region="west")
NOW = 3000.0
WINDOW = 0.0


def endpoint(
    present: Mapping[str, int],
    *,
    starting: Mapping[str, int] | None = None,
    utilization: float | None = 0.5,
    limits: tuple[int, int] = (0, 10),
    **changes: Any,
) -> EndpointScaleFacts:
    return EndpointScaleFacts(
        endpoint=HERE,
        present=present,
        starting=starting or {},
        utilization=utilization,
        min=limits[0],
        max=limits[1],
        **changes,
    )


def kinds(
    *, iw: tuple[int, float | None] = (0, None), niw: tuple[int, float | None] = (0, None), mixed: int = 0
) -> Any:
    """Instances of each kind on GPU type H, with their utilization; the facts that go into `endpoint`."""
    found = {
        InstanceKind.IW: KindFacts(present={"H": iw[0]}, utilization=iw[1]),
        InstanceKind.NIW: KindFacts(present={"H": niw[0]}, utilization=niw[1]),
        InstanceKind.MIXED: KindFacts(present={"H": mixed}, utilization=0.5 if mixed else None),
    }
    known = [part.utilization for part in found.values() if part.utilization is not None]
    return {
        "present": {"H": iw[0] + niw[0] + mixed},
        "kinds": found,
        "utilization": max(known, default=None),
    }


def decide(
    strategy: str, *endpoints: EndpointScaleFacts, now_s: float = NOW, window_start_s: float | None = WINDOW
) -> ScalingDecision:
    facts = ScalingFacts(endpoints=endpoints, window_start_s=window_start_s)
    return choose_scaling(facts, now_s, ScalingSettings(strategy=strategy))


def deltas(decision: ScalingDecision) -> dict[str | None, int]:
    return {step.gpu_type: step.delta for step in decision.steps}


def by_kind(decision: ScalingDecision) -> dict[str, int]:
    return {step.kind.value: step.delta for step in decision.steps}


@st.composite
def any_endpoint(draw: st.DrawFn) -> EndpointScaleFacts:
    """Anything that can be: instances of three kinds on three GPU types, some starting, some stuck."""
    parts, counted = {}, st.dictionaries(st.sampled_from("AHX"), st.integers(0, 3))
    for kind in InstanceKind:
        present = draw(counted)
        starting = {gpu_type: draw(st.integers(0, count)) for gpu_type, count in present.items()}
        stuck = {gpu_type: draw(st.integers(0, count - starting[gpu_type])) for gpu_type, count in present.items()}
        ready = sum(present.values()) - sum(starting.values()) - sum(stuck.values())
        utilization = draw(st.none() | st.floats(0, 1)) if ready else None
        parts[kind] = KindFacts(present=present, starting=starting, stuck=stuck, utilization=utilization)
    whole = {
        name: {gpu_type: sum(getattr(part, name).get(gpu_type, 0) for part in parts.values()) for gpu_type in "AHX"}
        for name in ("present", "starting", "stuck")
    }
    known = [part.utilization for part in parts.values() if part.utilization is not None]
    fewest = draw(st.integers(0, 5))
    return endpoint(
        whole["present"],
        starting=whole["starting"],
        stuck=whole["stuck"],
        kinds=parts,
        utilization=max(known, default=None),
        limits=(fewest, draw(st.integers(fewest, 9))),
        planned=draw(st.none() | st.dictionaries(st.sampled_from("AHX"), st.integers(0, 8))),
        last_scaled_s=draw(st.none() | st.floats(NOW - 30, NOW)),
        tokens_per_s=draw(st.dictionaries(st.sampled_from("AHX"), st.floats(10, 1000))),
        observed_tokens_per_s=draw(st.none() | st.floats(0, 5000)),
        forecast_tokens_per_s=draw(st.none() | st.floats(0, 5000)),
        backlog_tokens=draw(st.floats(0, 1e6)),
        backlog_due_s=draw(st.none() | st.floats(NOW - 100, NOW + 86_400)),
    )
