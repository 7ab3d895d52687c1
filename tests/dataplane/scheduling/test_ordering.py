"""The four orders on one queue, by hand, and what moves a request between classes."""

from dataclasses import dataclass
from typing import get_args

import pytest

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.ordering import Order, OrderSettings, order_key
from dataplane.scheduling.tiers import TIER_OBJECTIVES, TIER_RANKS


@dataclass(frozen=True)
class Request:
    name: str
    tier: Tier
    arrived_s: float
    own_ttft_s: float | None = None

    @property
    def ttft_s(self) -> float:
        return self.own_ttft_s or TIER_OBJECTIVES[self.tier].ttft_s


NOW_S = 100.0
QUEUE = (  # left until the deadline: F 1 s after arrival, N 60 s
    Request("batch", "NIW", 10.0),
    Request("n-old", "IW-N", 30.0),  # -10.0: recently expired with tau_n = 20
    Request("n-lost", "IW-N", 15.0),  # -25.0: severely expired
    Request("n-near", "IW-N", 40.4),  # 0.4: urgent with tau_p = 0.5
    Request("n-new", "IW-N", 99.0),  # 59.0
    Request("f-late", "IW-F", 98.0),  # -1.0: recently expired
    Request("f-near", "IW-F", 99.3),  # 0.3: urgent
    Request("f-new", "IW-F", 99.9),  # 0.9
    Request("f-lost", "IW-F", 70.0),  # -29.0: severely expired
)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", "n-lost n-old n-near f-lost f-late n-new f-near f-new batch"),
        ("edf", "f-lost n-lost n-old f-late f-near n-near f-new n-new batch"),
        ("pf", "f-lost f-late f-near f-new n-lost n-old n-near n-new batch"),
        ("dpa", "f-lost n-lost f-near n-near f-new n-new n-old f-late batch"),
    ],
)
def test_order(order: Order, expected: str) -> None:
    settings = OrderSettings(order=order, urgent_s=0.5, severely_expired_s=20.0)
    ordered = sorted(QUEUE, key=lambda request: order_key(request, NOW_S, settings))
    assert [request.name for request in ordered] == expected.split()


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", "patient default prompt"),
        ("edf", "prompt default patient"),  # due at 100.5, 100.9 and 105
        ("pf", "patient default prompt"),
        ("dpa", "prompt default patient"),
    ],
)
def test_a_models_own_objective_is_its_deadline(order: Order, expected: str) -> None:
    queue = [
        Request("patient", "IW-F", 99.0, 6.0),
        Request("default", "IW-F", 99.9),
        Request("prompt", "IW-F", 100.0, 0.5),
    ]
    settings = OrderSettings(order=order, urgent_s=0.5)
    ordered = sorted(queue, key=lambda request: order_key(request, NOW_S, settings))
    assert [request.name for request in ordered] == expected.split()


@pytest.mark.parametrize("order", get_args(Order))
def test_an_aged_batch_request_counts_as_a_fresh_normal_one(order: Order) -> None:
    settings = OrderSettings(order=order, niw_aged_s=36_000.0)
    fresh = Request("n", "IW-N", 36_000.0)
    batch = Request("batch", "NIW", 0.0)
    assert order_key(batch, 36_000.0, settings) == order_key(fresh, 36_000.0, settings)
    assert order_key(batch, 35_999.0, settings) > order_key(fresh, 36_000.0, settings)


@pytest.mark.parametrize(
    ("left_s", "dpa_class"),
    [(-20.001, 0), (-20.0, 5), (-0.001, 5), (0.0, 2), (0.5, 2), (0.501, 4)],
)
def test_edges_of_the_dpa_classes(left_s: float, dpa_class: int) -> None:
    settings = OrderSettings(order="dpa", urgent_s=0.5, severely_expired_s=20.0)
    request = Request("n", "IW-N", 0.0)
    assert order_key(request, 60.0 - left_s, settings)[1] == dpa_class


def test_tiers_rank_as_they_are_promised() -> None:
    assert sorted(TIER_RANKS, key=TIER_RANKS.__getitem__) == ["IW-F", "IW-N", "NIW"]
    assert set(TIER_OBJECTIVES) == set(Tier)
    ttft = [TIER_OBJECTIVES[tier].ttft_s for tier in ("IW-F", "IW-N", "NIW")]
    assert ttft == sorted(ttft)
