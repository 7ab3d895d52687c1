"""How long a model is without a turn."""

import pytest

from dataplane.scheduling.decode import Quota, RoundState, idle_s

ROUND = RoundState(
    quotas=tuple(Quota(model=model, quota_s=quota_s) for model, quota_s in zip("abc", (1.0, 2.0, 4.0), strict=True)),
    position=1,
    ends_s=101.5,
)


@pytest.mark.parametrize(
    ("model", "now_s", "idle"),
    [
        ("b", 100.0, 0.0),  # its turn
        ("c", 100.0, 1.5),  # after the rest of b's
        ("a", 100.0, 5.5),  # it had its turn: after c's, in the next round
        ("c", 103.0, 0.0),  # b is late
        ("a", 103.0, 4.0),
        ("d", 100.0, 0.0),  # it will join
    ],
)
def test_until_its_turn_the_others_have_theirs(model: str, now_s: float, idle: float) -> None:
    assert idle_s(ROUND, model, now_s) == pytest.approx(idle)


def test_without_a_round_nobody_is_idle() -> None:
    assert idle_s(RoundState(), "a", 100.0) == 0.0
