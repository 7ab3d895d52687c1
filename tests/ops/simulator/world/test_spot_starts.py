"""How long starts from spot take, and that they are charged."""

import numpy as np
import pytest

from ops.simulator.run import simulate
from ops.simulator.world.spot_starts import SpotStarts, SpotStartTimes
from tests.ops.simulator.scaled import scaled

SPREAD = SpotStartTimes(median_s=60.0, spread=0.5, most_s=300.0)
TRAFFIC = {"cv": 3.0, "duration_s": 1500.0}


def test_the_median_is_that_of_the_settings_and_the_most_is_kept() -> None:
    starts = SpotStarts(SPREAD, 1)
    drawn = np.array([starts.draw_s((f"east-{number % 40}", 0)) for number in range(4000)])
    assert np.median(drawn) == pytest.approx(60.0, rel=0.03)
    assert np.std(np.log(drawn)) == pytest.approx(0.5, rel=0.05)
    wide = SpotStarts(SpotStartTimes(median_s=60.0, spread=3.0, most_s=300.0), 1)
    assert max(wide.draw_s(("east-0", 0)) for _ in range(100)) == 300.0
    assert SpotStarts(SpotStartTimes(median_s=60.0), 1).draw_s(("east-0", 0)) == 60.0


def test_a_start_on_a_slot_takes_the_same_whatever_starts_elsewhere() -> None:
    one, other, another_seed = SpotStarts(SPREAD, 1), SpotStarts(SPREAD, 1), SpotStarts(SPREAD, 2)
    alone = [one.draw_s(("east-0", 0)) for _ in range(5)]
    among = []
    for _ in range(5):
        other.draw_s(("west-0", 0))
        among.append(other.draw_s(("east-0", 0)))
        other.draw_s(("east-0", 1))
    assert alone == among
    assert [another_seed.draw_s(("east-0", 0)) for _ in range(5)] != alone


def test_starts_from_spot_are_drawn_by_seed_and_charged_as_warming() -> None:
    spread = {"spot_same_spread": 0.5, "local_s": 0, "spot_other_s": 0, "remote_s": 0}
    scaling = {"out_above": 0.4, "in_below": 0.3}
    scenario = scaled("reactive", traffic=TRAFFIC, provisioning=spread, scaling=scaling)
    one, same, other = (simulate(scenario, seed=seed).result for seed in (1, 1, 2))
    assert one.totals.starts["spot_same"] > 0
    assert one.event_log_hash == same.event_log_hash != other.event_log_hash
    assert one.totals.gpu_hours["warming"] > 0
    at_once = scaled(
        "reactive", traffic=TRAFFIC, provisioning=spread | {"spot_same_spread": 0, "spot_same_s": 0}, scaling=scaling
    )
    assert simulate(at_once, seed=1).result.totals.gpu_hours.get("warming", 0.0) == 0.0
