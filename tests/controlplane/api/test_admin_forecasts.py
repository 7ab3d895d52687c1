"""`/admin/forecasts`: how forecasts of each series did, the worst first, and the hours of one."""

import time

import pytest

from controlplane.policies.facts import Endpoint
from controlplane.store.demand import IW, DemandRow, put_demand, put_forecasts, score_forecasts
from controlplane.store.session import Database
from tests.controlplane.api.conftest import Ask
from tests.controlplane.planner.test_expected import a_forecast

GOOD, BAD = Endpoint(model="tide", region="us-east"), Endpoint(model="surf", region="us-west")
NEW = Endpoint(model="foam", region="us-east")
HOUR_S = 3600


@pytest.fixture
def origin_s(database: Database) -> int:
    """Two hours that came as 1,000 tokens/s: one series forecast them well, another one five times too high, then far
    too low; a third one is new. Returns the beginning of the first hour.
    """
    first = int(time.time()) // HOUR_S * HOUR_S - 3 * HOUR_S
    minutes = [first + 60 * minute for minute in range(120)]
    demand = [
        DemandRow(endpoint=endpoint, kind=IW, start_s=minute, tokens_per_s=1000.0)
        for endpoint in (GOOD, BAD)
        for minute in minutes
    ]
    forecasts = [(GOOD, 0, 2000.0), (GOOD, 1, 2200.0), (BAD, 0, 10_000.0), (BAD, 1, 2.0)]
    newest = [a_forecast(endpoint, first + 2 * HOUR_S, 2000.0) for endpoint in (GOOD, BAD, NEW)]
    with database.transaction() as session:
        put_demand(session, demand)
        put_forecasts(session, [a_forecast(at, first + hour * HOUR_S, peak) for at, hour, peak in forecasts] + newest)
        assert score_forecasts(session, now_s=first + 2 * HOUR_S + 400) == 2
    return first


def test_the_worst_series_come_first(ask: Ask, origin_s: int) -> None:
    listed = ask("GET", "/admin/forecasts/series", role="viewer")["data"]
    assert [each["model"] for each in listed] == ["surf", "tide", "foam"], "a series without a score comes last"
    bad, good, new = listed
    assert (bad["hours"], bad["coverage"]) == (2, 0.5)
    assert bad["error"] == pytest.approx((4000 + 999) / 2000), "medians are half of the upper peaks"
    assert (good["coverage"], good["error"]) == (1.0, pytest.approx(100 / 2000))
    assert (new["hours"], new["coverage"], new["error"]) == (0, None, None)
    assert good["origin_s"] == origin_s + 2 * HOUR_S


def test_series_are_chosen_ordered_and_paged(ask: Ask, origin_s: int) -> None:
    def models(**query: object) -> list[str]:
        return [each["model"] for each in ask("GET", "/admin/forecasts/series", params=query)["data"]]

    assert models(order="model") == ["foam", "surf", "tide"]
    assert models(words="EAST") == ["tide", "foam"]
    assert models(region="us-west") == ["surf"]
    assert models(region="us_west") == []
    page = ask("GET", "/admin/forecasts/series", params={"order": "model", "limit": 2})
    assert (len(page["data"]), page["has_more"]) == (2, True)
    assert models(order="model", limit=2, after=page["next"]) == ["tide"]
    assert models(hours=1, order="model") == ["foam", "surf", "tide"]
    for name, value in (("order", "mood"), ("hours", 0), ("after", 0)):
        assert ask("GET", "/admin/forecasts/series", params={name: value}, status=400)["param"] == name


def test_the_hours_of_a_series_say_what_came(ask: Ask, origin_s: int) -> None:
    which = {"model": "surf", "region": "us-west"}
    hours = ask("GET", "/admin/forecasts/hours", role="viewer", params=which)["data"]
    assert [(each["origin_s"], each["peak_upper"], each["actual_peak"]) for each in hours] == [
        (origin_s, 10_000.0, 1000.0),
        (origin_s + HOUR_S, 2.0, 1000.0),
        (origin_s + 2 * HOUR_S, 2000.0, None),
    ]
    assert ask("GET", "/admin/forecasts/hours", params=which | {"model": "none"})["data"] == []
    assert ask("GET", "/admin/forecasts/hours", params={"model": "surf"}, status=400)["param"] == "region"


def test_nothing_was_forecast_yet(ask: Ask) -> None:
    assert ask("GET", "/admin/forecasts/series")["data"] == []
