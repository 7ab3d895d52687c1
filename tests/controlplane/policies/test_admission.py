"""Admission: refused is what could not begin in time; what is unknown refuses nobody."""

from typing import Any

import pytest

from controlplane.policies.admission import AdmissionSettings, choose_admission
from controlplane.policies.decisions import Admit, Refuse, Route, Wait
from controlplane.policies.facts import Endpoint, InstanceFacts, RoutingFacts
from controlplane.policies.routing import RoutingSettings, choose_route
from dataplane.protocol.tiers import InstanceKind, Tier

SETTINGS = AdmissionSettings(routing=RoutingSettings(stale_s=5.0), iw_f_margin=1.2, iw_n_margin=0.8, flex_below=0.6)
TTFT_S = {Tier.IW_F: 1.0, Tier.IW_N: 60.0}


def instance(name: str = "i", *, wait_s: float | None = 0.0, region: str = "east", **changes: Any) -> InstanceFacts:
    values: dict[str, Any] = {
        "instance_id": name,
        "node_id": f"node-{name}",
        "endpoint": Endpoint(model="tide", region=region),
        "gpu_type": "H800",
        "accepting": True,
        "age_s": 0.5,
        "kv_used_bytes": 0,
        "kv_capacity_bytes": 100,
        "remaining_tokens": 0,
        "prefill_wait_s": wait_s,
        "prefill_urgent_wait_s": wait_s,
        "prefill_token_s": None if wait_s is None else 0.001,
    }
    return InstanceFacts(**(values | changes))


def decide(tier: Tier, *instances: InstanceFacts, avoided: frozenset[str] = frozenset()) -> Admit | Refuse | Wait:
    facts = RoutingFacts(
        model="tide",
        tier=tier,
        preference=("east", "west"),
        instances=instances,
        avoided=avoided,
        ttft_s=TTFT_S.get(tier),
    )
    return choose_admission(facts, 0.0, SETTINGS)


ROWS = [
    # tier, seconds of wait, of an IW-F request, admitted
    (Tier.IW_F, 1.2, 1.2, True),
    (Tier.IW_F, 1.3, 1.3, False),
    (Tier.IW_F, 40.0, 1.2, True),
    (Tier.IW_N, 48.0, 0.0, True),
    (Tier.IW_N, 48.1, 0.0, False),
]


@pytest.mark.parametrize(("tier", "wait_s", "urgent_wait_s", "admitted"), ROWS)
def test_limits(tier: Tier, wait_s: float, urgent_wait_s: float, admitted: bool) -> None:
    reported = instance(wait_s=wait_s, prefill_urgent_wait_s=urgent_wait_s)
    assert isinstance(decide(tier, reported), Admit) == admitted


def test_the_best_instance_counts_and_only_those_that_may_serve() -> None:
    assert decide(Tier.IW_F, instance("a", wait_s=9.0), instance("b", wait_s=0.5)) == Admit()
    others = [
        instance("b", endpoint=Endpoint(model="other", region="east")),
        instance("c", age_s=9.0),
        instance("d", accepting=False),
        instance("e", kind=InstanceKind.NIW),
    ]
    for other in others:
        assert isinstance(decide(Tier.IW_F, instance("a", wait_s=9.0), other), Refuse), other


@pytest.mark.parametrize("failing", ["b", "node-b"])
def test_an_idle_instance_that_keeps_failing_admits_nobody(failing: str) -> None:
    busy, idle = instance("a", wait_s=9.0), instance("b", wait_s=0.0)
    assert isinstance(decide(Tier.IW_F, busy, idle, avoided=frozenset({failing})), Refuse)
    assert decide(Tier.IW_F, busy, idle, avoided=frozenset({"a", failing})) == Admit(), "none is well: all are tried"


def test_what_was_just_sent_counts() -> None:
    assert isinstance(decide(Tier.IW_F, instance(sent_input_tokens=1500)), Refuse)
    assert decide(Tier.IW_F, instance(sent_tokens=1500)) == Admit(), "tokens still to be made keep nobody waiting"


def test_unknown_waits_refuse_nobody() -> None:
    assert decide(Tier.IW_F) == Admit()
    assert decide(Tier.IW_F, instance(wait_s=None)) == Admit()
    assert decide(Tier.IW_F, instance("a", wait_s=9.0), instance("b", wait_s=None)) == Admit()
    assert decide(Tier.IW_F, instance(wait_s=9.0, age_s=60.0)) == Admit(), "stale"


def test_when_to_come_again() -> None:
    for wait_s, after_s in ((1.3, 1), (4.3, 4), (500.0, 60)):
        refused = decide(Tier.IW_F, instance(wait_s=wait_s))
        assert isinstance(refused, Refuse)
        assert refused.retry_after_s == after_s
        assert "IW-F" in refused.reason


def test_flex_waits_for_spare_room() -> None:
    assert decide(Tier.NIW, instance(kv_used_bytes=59)) == Admit()
    assert decide(Tier.NIW, instance(kv_used_bytes=60)) == Wait()
    assert decide(Tier.NIW) == Admit(), "the router says that there is nothing"
    assert decide(Tier.NIW, instance(wait_s=1e9)) == Admit()


def test_routing_prefers_an_instance_that_begins_in_time() -> None:
    late, soon = instance("a", wait_s=2.0), instance("b", wait_s=0.1, region="west")
    for ttft_s, chosen in ((None, "a"), (1.0, "b"), (5.0, "a")):
        facts = RoutingFacts(
            model="tide", tier=Tier.IW_F, preference=("east", "west"), instances=(late, soon), ttft_s=ttft_s
        )
        route = choose_route(facts, 0.0, SETTINGS.routing)
        assert isinstance(route, Route)
        assert route.instance_id == chosen
    alone = RoutingFacts(model="tide", tier=Tier.IW_F, preference=("east",), instances=(late,), ttft_s=1.0)
    assert isinstance(choose_route(alone, 0.0, SETTINGS.routing), Route)
