"""Chiron with the paper's numbers: theta 0.6, ten interactive, five mixed and five batch instances at the start."""

import pytest

from controlplane.policies.scaling.facts import EndpointScaleFacts, KindFacts, KindStep
from dataplane.protocol.tiers import InstanceKind
from tests.controlplane.policies.scaling.endpoints import HERE, NOW, by_kind, decide, endpoint, kinds

THETA = 100.0


def chiron(iw: int, mixed: int, niw: int, *, observed: float | None, **changes: object) -> EndpointScaleFacts:
    """Instances of 100 tokens/s each."""
    facts = kinds(iw=(iw, 0.5), niw=(niw, 0.5), mixed=mixed)
    values = {"limits": (2, 20), "tokens_per_s": {"H": THETA}, "observed_tokens_per_s": observed} | changes
    return endpoint(facts.pop("present"), **(facts | values))


def test_at_the_papers_start_nine_busy_of_fifteen_is_theta() -> None:
    assert decide("chiron", chiron(10, 5, 0, observed=900.0)).steps == ()


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (chiron(10, 5, 0, observed=1000.0), {"IW": 2}),  # 10 / 0.6 = 17, of which a third is mixed
        (chiron(10, 5, 0, observed=600.0), {"IW": -3, "mixed": -2}),  # 6 / 0.6 = 10
        (chiron(10, 5, 5, observed=900.0), {"NIW": -5}),  # the queue is empty
        (chiron(10, 5, 0, observed=None), {}),
        (chiron(10, 5, 0, observed=1000.0, tokens_per_s={}), {}),  # no profile, no pressure
        (chiron(10, 5, 0, observed=1000.0, last_scaled_s=NOW - 1), {}),
        (chiron(0, 0, 0, observed=None, utilization=None), {"mixed": 2}),  # the minimum in any case
        (chiron(10, 5, 0, observed=9000.0), {"IW": 4, "mixed": 1}),  # 20 is the most
        (chiron(10, 5, 5, observed=600.0, utilization=None), {}),  # unknown lets nothing go
    ],
)
def test_interactive_backpressure_is_held_at_theta(facts: EndpointScaleFacts, expected: dict[str, int]) -> None:
    assert by_kind(decide("chiron", facts)) == expected


@pytest.mark.parametrize(
    ("tokens", "left_s", "expected"),
    [
        (100_000.0, 200.0, {}),  # 5 instances for 200 s: the mixed ones do it
        (140_000.0, 200.0, {"NIW": 2}),
        (1e9, 200.0, {"NIW": 5}),  # what interactive instances leave of 20
        (36_000.0, -50.0, {"NIW": 1}),  # past its deadline: as if a minute were left
    ],
)
def test_batch_instances_come_before_a_deadline_is_missed(
    tokens: float, left_s: float, expected: dict[str, int]
) -> None:
    facts = chiron(10, 5, 0, observed=900.0, backlog_tokens=tokens, backlog_due_s=NOW + left_s)
    assert by_kind(decide("chiron", facts)) == expected


@pytest.mark.parametrize(
    ("mixed", "iw_starting", "observed", "expected"),
    [
        (1, 2, 100.0, {}),  # two would do, and neither serves yet
        (1, 0, 0.0, {"mixed": -1}),  # none is wanted
        (2, 2, 100.0, {"mixed": -1}),
    ],
)
def test_the_last_that_serves_stays_until_another_does(
    mixed: int, iw_starting: int, observed: float, expected: dict[str, int]
) -> None:
    iw = KindFacts(present={"H": iw_starting}, starting={"H": iw_starting})
    facts = endpoint(
        {"H": mixed + iw_starting},
        starting={"H": iw_starting},
        kinds={InstanceKind.IW: iw, InstanceKind.MIXED: KindFacts(present={"H": mixed}, utilization=0.5)},
        limits=(0, 3),
        tokens_per_s={"H": THETA},
        observed_tokens_per_s=observed,
    )
    assert by_kind(decide("chiron", facts)) == expected


def test_one_kind_becomes_another_rather_than_going() -> None:
    decision = decide("chiron", chiron(15, 0, 0, observed=900.0))
    assert decision.steps == ()
    assert decision.kinds == (KindStep(endpoint=HERE, before=InstanceKind.IW, after=InstanceKind.MIXED, count=5),)
