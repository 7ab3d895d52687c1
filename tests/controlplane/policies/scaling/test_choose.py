"""Bad facts and settings are refused."""

import pytest

from controlplane.policies.scaling.facts import ScalingSettings
from tests.controlplane.policies.scaling.endpoints import endpoint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limits": (3, 2)}, "min 3, max 2"),
        ({"starting": {"H": 3}}, r"starting and stuck\[H\] are 3 of 2"),
        ({"starting": {"H": 1}, "stuck": {"H": 2}}, r"starting and stuck\[H\] are 3 of 2"),
        ({"planned": {"H": -1}}, "not be negative"),
    ],
)
def test_bad_facts_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        endpoint({"H": 2}, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "lt-x"}, "chiron, lt-d, lt-i, lt-u, lt-ua, reactive, siloed"),
        ({"in_below": 0.8}, "in_below < out_above"),
        ({"cooldown_s": -1.0}, "cooldown_s must not be negative"),
        ({"last_s": 4000.0}, "last_s <= window_s"),
        ({"below_at": 2.0}, "below_at < 1 < beyond_at"),
        ({"room_out": 0.9}, "1 <= room_out < room_in"),
        ({"room_in": 1.1}, "1 <= room_out < room_in"),
        ({"chiron_theta": 0.0}, "chiron_theta must lie between 0 and 1"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScalingSettings(**change)  # type: ignore[arg-type]
