"""Reactive and Siloed as SageServe 4 tells them."""

from dataclasses import replace

import pytest

from controlplane.policies.scaling.choose import kind_for
from controlplane.policies.scaling.facts import EndpointScaleFacts
from dataplane.protocol.tiers import InstanceKind
from tests.controlplane.policies.scaling.endpoints import NOW, by_kind, decide, deltas, endpoint, kinds


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (endpoint({"H": 2}, utilization=0.71), {None: 1}),
        (endpoint({"H": 2}, utilization=0.70), {}),  # above, not at
        (endpoint({"H": 2}, utilization=0.29), {None: -1}),
        (endpoint({"H": 2}, utilization=0.30), {}),
        (endpoint({"H": 2}, utilization=0.99, last_scaled_s=NOW - 14.9), {}),  # cooling down
        (endpoint({"H": 2}, utilization=0.99, last_scaled_s=NOW - 15), {None: 1}),
        (endpoint({"H": 2}, utilization=0.99, starting={"H": 1}), {}),  # nothing stacked: two will be at 50 %
        (endpoint({"H": 5}, utilization=0.99, starting={"H": 1}), {None: 1}),  # five will be at 79 %
        (endpoint({"H": 2}, utilization=0.01, starting={"H": 1}), {}),
        (endpoint({"H": 3}, utilization=0.99, stuck={"H": 1}), {None: 1}),  # what does not come up is no help
        (endpoint({"H": 2}, utilization=0.99, limits=(0, 2)), {}),
        (endpoint({"H": 2}, utilization=0.01, limits=(2, 4)), {}),
        (endpoint({"H": 2}, utilization=None), {}),
        (endpoint({"H": 0}, utilization=None, limits=(2, 4), last_scaled_s=NOW - 1), {None: 2}),  # below min: always
        (endpoint({"H": 6}, limits=(2, 4)), {None: -2}),
        (endpoint({"H": 6}, limits=(2, 4), utilization=None), {}),
        (endpoint({"H": 2}, utilization=0.01, observed_tokens_per_s=1.0), {None: -1}),
        (endpoint({"H": 1}, utilization=0.01, observed_tokens_per_s=1.0), {}),  # else it would start again at once
        (endpoint({"H": 1}, utilization=0.01, observed_tokens_per_s=0.0), {None: -1}),
        (endpoint({}, utilization=None, observed_tokens_per_s=0.0), {}),
        (endpoint({}, utilization=None, observed_tokens_per_s=1.0), {None: 1}),  # requests and nobody there
    ],
)
def test_reactive_follows_utilization(facts: EndpointScaleFacts, expected: dict[str | None, int]) -> None:
    assert deltas(decide("reactive", facts)) == expected


def siloed(limits: tuple[int, int] = (2, 20), **found: tuple[int, float | None]) -> EndpointScaleFacts:
    facts = kinds(**found)
    return endpoint(facts.pop("present"), limits=limits, **facts)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (siloed(iw=(4, 0.8), niw=(2, 0.5)), {"IW": 1}),  # the deferred silo's room is no help
        (siloed(iw=(4, 0.5), niw=(2, 0.8)), {"NIW": 1}),
        (siloed(iw=(4, 0.8), niw=(4, 0.8)), {"IW": 1}),  # 4 of 20 are the deferred silo's maximum
        (siloed(iw=(16, 0.8), niw=(2, 0.8)), {"NIW": 1}),  # 16 the other's
        (siloed(iw=(2, 0.1), niw=(2, 0.1)), {}),  # two each stay (Unified shares two)
        (siloed(iw=(3, 0.1), niw=(3, 0.1)), {"IW": -1, "NIW": -1}),
        (siloed(iw=(3, None), niw=(3, 0.1)), {"NIW": -1}),  # unknown is frozen, the other goes on
        (siloed(iw=(4, 0.5)), {"NIW": 2}),
        (siloed((1, 2), iw=(1, 0.9), niw=(1, 0.9)), {}),
        (siloed((1, 2), iw=(1, 0.9)), {"NIW": 1}),
    ],
)
def test_silos_scale_apart(facts: EndpointScaleFacts, expected: dict[str, int]) -> None:
    assert by_kind(decide("siloed", facts)) == expected


@pytest.mark.parametrize(("observed", "backlog", "expected"), [(1.0, 0.0, {"NIW": -1}), (0.0, 1.0, {"IW": -1})])
def test_the_last_of_a_silo_stays_while_its_requests_come(
    observed: float, backlog: float, expected: dict[str, int]
) -> None:
    facts = replace(siloed((0, 20), iw=(1, 0.1), niw=(1, 0.1)), observed_tokens_per_s=observed, backlog_tokens=backlog)
    assert by_kind(decide("siloed", facts)) == expected


def test_an_endpoint_of_one_instance_is_not_parted() -> None:
    alone = endpoint({"H": 0}, utilization=None, limits=(1, 1))
    assert by_kind(decide("siloed", alone)) == {"mixed": 1}


@pytest.mark.parametrize(
    ("strategy", "most", "expected"),
    [("siloed", 4, ["IW", "NIW", "IW"]), ("siloed", 1, ["mixed"] * 3), ("chiron", 4, ["IW", "NIW", "mixed"])]
    + [(unified, 4, ["mixed"] * 3) for unified in ("lt-i", "lt-u", "lt-ua", "reactive")],
)
def test_kinds_after_the_strategy_changed(strategy: str, most: int, expected: list[str]) -> None:
    before = [InstanceKind.IW, InstanceKind.NIW, InstanceKind.MIXED]
    assert [kind_for(strategy, kind, instances_max=most).value for kind in before] == expected
