import numpy as np
import pytest

from forecasts.series import DemandRow
from forecasts.synthetic import generate_demand


def demand(rows: list[DemandRow], region: str, model: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([row.tokens_per_s for row in rows if (row.region, row.model) == (region, model)], dtype=np.float64)


def test_the_same_seed_gives_the_same_rows() -> None:
    first = generate_demand(["us", "eu"], ["a", "b"], 0.5, 7, start_s=600)
    assert first == generate_demand(["us", "eu"], ["a", "b"], 0.5, 7, start_s=600)
    assert first != generate_demand(["us", "eu"], ["a", "b"], 0.5, 8, start_s=600)
    assert len(first) == 2 * 2 * 720
    assert [row.start_s for row in first[:2]] == [600, 660]


def test_days_weeks_time_zones_and_popularity_show() -> None:
    rows = generate_demand(["us", "eu"], ["a", "b", "c"], 7, 1, utc_offsets_h={"us": -6, "eu": 2})
    us, eu = demand(rows, "us", "a"), demand(rows, "eu", "a")
    by_hour = us[: 5 * 1440].reshape(5, 24, 60).mean(axis=(0, 2))
    assert abs(int(by_hour.argmax()) - 21) <= 2  # 15 h in a region six hours behind
    assert abs(int(eu[: 5 * 1440].reshape(5, 24, 60).mean(axis=(0, 2)).argmax()) - 13) <= 2
    assert by_hour.max() > 2 * by_hour.min()
    assert eu[5 * 1440 :].mean() < 0.8 * eu[: 5 * 1440].mean()
    popular = [demand(rows, "us", model).mean() for model in "abc"]
    assert popular[0] > 1.7 * popular[1] > popular[2]
    assert (us >= 0).all()


def test_an_endpoint_does_not_depend_on_the_other_regions() -> None:
    offsets = {"us": -6.0, "eu": 2.0}
    alone = generate_demand(["us"], ["a"], 0.2, 3, utc_offsets_h=offsets)
    beside = generate_demand(["eu", "us"], ["a"], 0.2, 3, utc_offsets_h=offsets)
    assert alone == [row for row in beside if row.region == "us"]


@pytest.mark.parametrize(
    ("regions", "models", "days", "message"),
    [([], ["a"], 1, "regions"), (["r"], ["a", "a"], 1, "models"), (["r"], ["a"], 0, "days must be positive, got 0")],
)
def test_bad_arguments_are_refused(regions: list[str], models: list[str], days: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate_demand(regions, models, days, 1)
