"""`tidepool forecast backtest`, and what it rests on: hours, scores, and that nothing sees what comes after it."""

import csv
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import forecasts.backtests
from forecasts.backtests import CHAMPION, Cost, Prediction, elsewhere, hours_of, reliability_of, scores_of, window_s
from forecasts.importers.series_file import EndpointSeries, read_series
from forecasts.selection.calibration import SPREAD
from forecasts.series import DemandSeries
from forecasts.settings import ForecastSettings
from tests.ops.cli.running import Run

DATA = Path(os.environ.get("TIDEPOOL_DATA", Path(__file__).parents[4] / "shared" / "data"))
START_S = 1_731_283_200
QUICK = ("--forecaster", "typical day's shape")


@pytest.fixture
def backtest(run: Run) -> Run:
    return lambda *arguments: run("forecast", "backtest", *arguments)


def days(hours: int, model: str = "m", seed: int = 0, bucket_s: int = 600) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    for place in range(hours * 3600 // bucket_s):
        time_s = START_S + place * bucket_s
        rate = 1000 * (1.5 + math.sin(time_s / 86_400 * 2 * math.pi)) * rng.lognormal(0, 0.1)
        yield f"{time_s},us,{model},{'' if place % 50 == 7 else f'{rate:.3f}'}"


def save(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["start_s,region,model,tokens_per_s", *lines]) + "\n")
    return path


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_hours_are_those_of_the_clock() -> None:
    settings = ForecastSettings(history_min_s=7200.0)
    series = DemandSeries(start_s=START_S + 1200.0, bucket_s=600.0, values=np.ones(6 * 5))
    assert [hour - START_S for hour in hours_of(series, settings)] == [7200, 10_800, 14_400]
    shifted = DemandSeries(start_s=START_S + 1290.0, bucket_s=600.0, values=np.ones(6 * 5))
    assert [hour - START_S for hour in hours_of(shifted, settings)] == [7290, 10_890, 14_490]
    assert hours_of(series.before(series.start_s + 3600.0), settings) == []


@pytest.mark.parametrize(
    ("bucket_s", "expected_s"), [(1, 300), (60, 300), (45, 360), (300, 300), (600, 600), (1800, 1800), (3600, 3600)]
)
def test_windows_are_whole_buckets_and_divide_an_hour(bucket_s: float, expected_s: float) -> None:
    assert window_s(bucket_s) == expected_s


@pytest.mark.parametrize("bucket_s", [7.0, 700.0, 7200.0, 86_400.0])
def test_buckets_that_do_not_divide_an_hour_are_refused(bucket_s: float) -> None:
    with pytest.raises(ValueError, match="do not divide an hour"):
        window_s(bucket_s)


def test_scores() -> None:
    """Peaks 100 and 300; medians miss by 20 and 40; the upper quantile is 20 above the first and misses the second."""
    known = [(80.0, 120.0, 100.0), (260.0, 280.0, 300.0)]
    rows = [Prediction(0.0, CHAMPION, "a", *each) for each in known] + [Prediction(0.0, CHAMPION, "a", 9.0, 9.0, None)]
    better = [Prediction(0.0, "a", "a", actual, actual, actual) for _, _, actual in known]
    champion, other = scores_of([*better, *rows], 0.9, {CHAMPION: Cost(None, 1.5)})
    assert (champion.forecaster, champion.hours, champion.fit_s, champion.forecast_s) == (CHAMPION, 2, None, 1.5)
    assert champion.error == pytest.approx(60 / 400)
    assert champion.coverage == 0.5
    assert champion.over_provision == pytest.approx(20 / 400)
    assert champion.pinball == pytest.approx((0.1 * 20 + 0.9 * 20) / 400)
    assert champion.equal_cover == pytest.approx((120 * 300 / 280 - 100) / 400)  # times 300 / 280, both are covered
    assert (other.error, other.coverage, other.over_provision, other.forecast_s) == (0, 1, 0, None)


def test_scores_of_nothing_and_of_silence_are_unknown() -> None:
    (nothing,) = scores_of([Prediction(0.0, CHAMPION, "a", 1.0, 1.0, None)], 0.9, {})
    assert (nothing.hours, nothing.error, nothing.coverage, nothing.over_provision) == (0, None, None, None)
    (silence,) = scores_of([Prediction(0.0, CHAMPION, "a", 0.0, 0.0, 0.0)], 0.9, {})
    assert (silence.hours, silence.error, silence.coverage) == (1, None, 1.0)


def test_reliability_is_the_share_at_or_under_each_quantile() -> None:
    low, high = (1.0,) * len(SPREAD), (5.0,) * len(SPREAD)
    rows = [Prediction(0.0, CHAMPION, "a", 3.0, 4.0, 2.0, spread) for spread in (low, low, low, high)]
    found = reliability_of(
        [*rows, Prediction(0.0, CHAMPION, "a", 3.0, 4.0, None, low), Prediction(0.0, "a", "a", 3, 4, 2)]
    )
    assert found is not None
    assert (found.hours, found.levels, found.covered) == (4, SPREAD, (0.25,) * len(SPREAD))
    assert reliability_of(rows[:0]) is None


def test_regions_of_one_model_are_each_others_like() -> None:
    """On the grid of the series, and only of its model; where none is known there is a gap."""

    def one(region: str, model: str, start_s: float, values: list[float]) -> EndpointSeries:
        series = DemandSeries(start_s=start_s, bucket_s=600.0, values=np.array(values))
        return EndpointSeries(region=region, model=model, series=series)

    mine = one("a", "m", 1200.0, [1.0, 1.0, 1.0, 1.0])
    early, late = one("b", "m", 0.0, [5.0, 5.0, 2.0, np.nan]), one("c", "m", 1800.0, [7.0, 7.0])
    other = one("b", "n", 0.0, [100.0] * 9)
    found = elsewhere([mine, early, late, other], mine)
    assert found is not None
    assert found.start_s == 1200
    np.testing.assert_array_equal(found.values, [2, 7, 7, np.nan])
    assert elsewhere([mine, other], mine) is None


def test_what_is_printed_and_written(backtest: Run, tmp_path: Path) -> None:
    file = save(tmp_path / "demand.csv", *days(26), *days(26, "n", seed=1))
    out, picture = tmp_path / "p.csv", tmp_path / "p.png"
    outcome = backtest(file, *QUICK, "--origins", 3, "--quantile", 0.8, "--predictions", out, "--plot", picture)
    assert outcome.status == 0
    for words in ("m in us", "n in us", "champion", "last hour's maximum", "All 2 series, for the 80 % quantile"):
        assert words in outcome.out, words
    rows = table(out)
    assert list(rows[0]) == ["origin_s", "region", "model", "forecaster", "peak_q50", "peak_q80", "actual_peak"]
    origins = {row["origin_s"] for row in rows}
    assert origins == {str(START_S + hour * 3600) for hour in (23, 24, 25)}
    assert len({(row["origin_s"], row["model"], row["forecaster"]) for row in rows}) == len(rows)
    assert {row["model"] for row in rows if row["forecaster"] == CHAMPION} == {"m", "n"}
    assert picture.read_bytes()[:4] == b"\x89PNG"
    (series, _) = read_series(file)
    for row in rows:
        if row["model"] == "m":
            peak = series.series.before(float(row["origin_s"]) + 3600).last(3600).maximum()
            assert float(row["actual_peak"]) == pytest.approx(peak)
            assert 0 <= float(row["peak_q50"]) <= float(row["peak_q80"])


def test_json_says_the_same_and_nothing_else(backtest: Run, tmp_path: Path) -> None:
    file = save(tmp_path / "demand.csv", *days(12), *(f"{START_S + 60 * i},us,short,1" for i in range(60)))
    outcome = backtest(file, *QUICK, "--json")
    answer = outcome.json
    assert (outcome.status, answer["quantile"], answer["interrupted"]) == (0, 0.9, False)
    whole, short = answer["series"]
    assert (whole["model"], whole["bucket_s"], whole["reason"], whole["scores"][0]["hours"]) == ("m", 600, None, 6)
    assert sum(whole["chosen"].values()) == 6
    assert (short["scores"], "hours are too few" in short["reason"]) == ([], True)
    assert answer["overall"] == whole["scores"]
    alone = {score["forecaster"]: score for score in whole["scores"]}
    assert alone["champion"]["forecast_s"] > 0
    assert alone["last hour's maximum"]["fit_s"] is not None
    assert answer["seconds"] >= whole["seconds"] > 0


@pytest.mark.parametrize(
    "tail",
    [pytest.param("other values", marks=pytest.mark.slow), pytest.param("gaps", marks=pytest.mark.slow), "cut off"],
)
def test_no_prediction_changes_when_what_comes_after_it_does(backtest: Run, tmp_path: Path, tail: str) -> None:
    """What is known at hour 13 stays; from there on the file is another, or ends some time later."""
    lines, cut = list(days(16)), 13 * 6
    ends = {
        "other values": [f"{line.rsplit(',', 1)[0]},{9e4 + i}" for i, line in enumerate(lines[cut:])],
        "gaps": [f"{line.rsplit(',', 1)[0]}," for line in lines[cut:]],
        "cut off": lines[cut : cut + 7],
    }
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    assert backtest(save(tmp_path / "a.csv", *lines), "--origins", 12, "--predictions", first).status == 0
    assert (
        backtest(save(tmp_path / "b.csv", *lines[:cut], *ends[tail]), "--origins", 12, "--predictions", second).status
        == 0
    )
    known = [
        {(row["origin_s"], row["forecaster"]): (row["peak_q50"], row["peak_q90"]) for row in table(path)}
        for path in (first, second)
    ]
    both = [key for key in known[0] if key in known[1] and int(key[0]) <= START_S + 13 * 3600]
    assert len({origin for origin, _ in both}) >= 6
    assert {key: known[0][key] for key in both} == {key: known[1][key] for key in both}
    if tail == "other values":
        assert any(known[0][key] != known[1][key] for key in known[0] if int(key[0]) > START_S + 14 * 3600)


def test_ctrl_c_shows_what_is_done(backtest: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rolled = forecasts.backtests.rolling_origins

    def interrupted(
        series: DemandSeries, settings: ForecastSettings, hours: list[float], like: DemandSeries | None
    ) -> Iterator[object]:
        for place, one in enumerate(rolled(series, settings, hours, like)):
            if place == 8:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(forecasts.backtests, "rolling_origins", interrupted)
    file = save(tmp_path / "demand.csv", *days(12), *days(12, "n"))
    outcome = backtest(file, *QUICK, "--json", "--predictions", tmp_path / "p.csv")
    answer = outcome.json
    assert (outcome.status, answer["interrupted"]) == (130, True)
    (only,) = answer["series"]
    assert (only["reason"], only["scores"][0]["hours"]) == ("interrupted", 4)
    assert len([row for row in table(tmp_path / "p.csv") if row["forecaster"] == CHAMPION]) == 4


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "holds no demand: nothing after the header"),
        (("0,us,a,1",), "line 2: one row does not define the bucket width"),
        (("0,us,a,1", "60,us,a,-1"), "line 3: column tokens_per_s must be finite and not negative"),
        (("0,us,a,1", "7,us,a,1"), "no series has an hour to forecast"),
        (("0,us,a,1", "60,us,a,1"), "no series has an hour to forecast"),
        (("0,us,a,1", "1,us,a,1", "1e11,us,a,1"), "over the limit of 4000000; is a time wrong?"),
    ],
)
def test_a_file_that_cannot_be_backtested_says_why(
    backtest: Run, tmp_path: Path, lines: tuple[str, ...], message: str
) -> None:
    outcome = backtest(save(tmp_path / "demand.csv", *lines))
    assert outcome.status == 1
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_what_cannot_be_written_is_said_before_the_work(backtest: Run, tmp_path: Path) -> None:
    file = save(tmp_path / "demand.csv", *days(12))
    for arguments, message in (
        (("--plot", tmp_path / "x.gif"), "must end in one of .png"),
        (("--plot", tmp_path / "none" / "x.png"), "does not exist"),
        (("--predictions", tmp_path / "none" / "x.csv"), "does not exist"),
        (("--predictions", file), "is the file to read"),
        (("--quantile", "1.5"), "quantile must be above 0.5 and below 1"),
        (("--forecaster", "oracle"), "--forecaster: 'oracle' is none of: "),
    ):
        outcome = backtest(file, *arguments)
        assert (outcome.status, outcome.out) == (1, ""), arguments
        assert message in outcome.err, arguments
    assert backtest(file, "--origins", 0).status == 2
    assert backtest(file, "--quantile", "nan").status == 2
    assert backtest(tmp_path / "none.csv").status == 2


@pytest.mark.parametrize("rates", [["5"] * 72, ["0"] * 72, [""] * 71 + ["3"], ["1e300"] * 72])
def test_odd_demand_is_answered(backtest: Run, tmp_path: Path, rates: list[str]) -> None:
    lines = [f"{START_S + 600 * i},us,m,{rate}" for i, rate in enumerate(rates)]
    outcome = backtest(save(tmp_path / "demand.csv", *lines), "--plot", tmp_path / "x.png")
    assert "Traceback" not in outcome.err
    assert outcome.status == 0 or "no series has an hour to forecast" in outcome.err


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "sageserve").is_dir(), reason=f"no recorded demand in {DATA}")
def test_a_recorded_week_is_imported_and_backtested(run: Run, tmp_path: Path) -> None:
    source, week = DATA / "sageserve" / "nov2024_week_prompt_tokens_per_min.csv.gz", tmp_path / "week.csv"
    assert run("forecast", "import", "sageserve", source, "--out", week).status == 0
    lines = [line for line in week.read_text().splitlines() if ",C," in line][: 30 * 60]
    champion = run("forecast", "backtest", save(week, *lines), "--origins", 6, "--json").json["overall"][0]
    assert champion["hours"] == 6
    assert 0 < champion["error"] < 0.5
