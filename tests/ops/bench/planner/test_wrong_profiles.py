"""The benchmark of wrong profiles: which days, and how wrong."""

import pytest

from ops.bench.planner.strategies_cases import CASES, SCENARIO
from ops.bench.planner.wrong_profiles import DAYS, settings_of, show, two_days
from ops.simulator.scenario.scenario import load_scenario


@pytest.mark.parametrize("name", DAYS)
def test_the_day_before_is_served_too(name: str) -> None:
    days = CASES[name].days
    assert days is not None
    assert two_days(CASES[name]).days == (days[0], days[1] - 1, days[2])


def test_every_profile_is_wrong_by_the_factor() -> None:
    scenario = load_scenario(SCENARIO)
    changed = load_scenario(SCENARIO, settings=settings_of(scenario, 1.5, corrected=True))
    assert [model.tokens_per_s for model in changed.models] == [2250.0]
    assert (scenario.planning.correct_profiles, changed.planning.correct_profiles) == (False, True)


def test_the_table_says_which_is_which(capsys: pytest.CaptureFixture[str]) -> None:
    show([{"case": "a-day", "factor": 1.5, "corrected": True, "instance_hours": 236.2, "late": 0.08}])
    out = capsys.readouterr().out
    assert all(text in out for text in ("a-day", "x 1.5", "yes", "236.2", "8.0%"))
