"""From recorded weeks to a plan: import, forecast, place. The files are in TIDEPOOL_DATA, or beside the repository."""

import os
from pathlib import Path

import pytest

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.decision import PlacementStatus
from controlplane.policies.placement.facts import (
    PlacementFacts,
    PlacementModel,
    PlacementSettings,
    Profile,
)
from forecasts.importers import read_azure_week, read_sageserve_week
from forecasts.selection.select import PeakForecast, forecast_peak
from forecasts.series import DemandRow, DemandSeries
from forecasts.settings import ArimaSettings, ForecastSettings

BESIDE = Path(__file__).resolve().parents[4].parent / "shared" / "data"
DATA = Path(os.environ.get("TIDEPOOL_DATA", BESIDE))
SAGESERVE = DATA / "sageserve" / "nov2024_week_prompt_tokens_per_min.csv.gz"
AZURE = DATA / "azure" / "azure2024_week_requests_10s_Coding.csv.gz"
REGIONS = ("east", "west")
WEEK_S = 7 * 86_400.0
QUICK = ForecastSettings(origins_max=12, arima=ArimaSettings(history_s=2 * 86_400, exact_fits_max=2))
THURSDAY_NOON_S = 3 * 86_400.0 + 12 * 3600.0

pytestmark = pytest.mark.skipif(
    not (SAGESERVE.is_file() and AZURE.is_file()),
    reason=f"no recorded demand in {DATA}: set TIDEPOOL_DATA to the folder with sageserve/ and azure/",
)


@pytest.fixture(scope="module")
def series() -> dict[str, DemandSeries]:
    rows = [*read_sageserve_week(SAGESERVE), *read_azure_week(AZURE)]
    return {model: series_of(rows, model) for model in ("A", "C", "coding")}


def series_of(rows: list[DemandRow], model: str) -> DemandSeries:
    return DemandSeries.from_rows((row.start_s, row.tokens_per_s) for row in rows if row.model == model)


@pytest.fixture(scope="module")
def forecasts(series: dict[str, DemandSeries]) -> dict[str, PeakForecast]:
    noon = {model: each.before(each.start_s + THURSDAY_NOON_S) for model, each in series.items()}
    return {model: forecast_peak(each, QUICK) for model, each in noon.items()}


def test_each_week_is_whole(series: dict[str, DemandSeries]) -> None:
    assert {model: round(each.duration_s / 60) for model, each in series.items()} == {
        "A": 10_080,
        "C": 10_080,
        "coding": 10_081,  # the file ends with the first 10 s of the eighth day
    }
    # 16.8 million requests of 2,560 input tokens in a week
    assert series["coding"].values.mean() * WEEK_S == pytest.approx(16.8e6 * 2560, rel=0.01)


def test_forecasts_come_near_what_came(series: dict[str, DemandSeries], forecasts: dict[str, PeakForecast]) -> None:
    for model, forecast in forecasts.items():
        came = series[model].rebin(300.0).before(forecast.origin_s + 3600.0).last_hour_max()
        assert forecast.candidates[0].origins > 0, forecast.reason
        assert came / 2 < forecast.peak_q50 < came * 2
        assert forecast.peak_upper > forecast.peak_q50


def test_the_forecast_demand_is_placed(forecasts: dict[str, PeakForecast]) -> None:
    """Two regions share each model's demand 70 to 30; 192 GPUs hold it, 16 do not."""
    roomy, tight = (choose_placement(facts(forecasts, gpus), 0.0, PlacementSettings()) for gpus in (96, 8))
    for placement, gpus in ((roomy, 96), (tight, 8)):
        assert placement.status == PlacementStatus.OPTIMAL
        for region in REGIONS:
            assert sum(2 * entry.after for entry in placement.entries if entry.endpoint.region == region) <= gpus
    assert roomy.unserved == ()
    for model, forecast in forecasts.items():
        instances = sum(entry.after for entry in roomy.entries if entry.endpoint.model == model)
        assert forecast.peak_upper <= 4000 * instances < forecast.peak_upper + 3 * 4000
    assert {each.model for each in tight.unserved} <= set(forecasts)
    assert tight.unserved


def facts(forecasts: dict[str, PeakForecast], gpus: int) -> PlacementFacts:
    shares = dict(zip(REGIONS, (0.7, 0.3), strict=True))
    return PlacementFacts(
        regions=REGIONS,
        models=tuple(PlacementModel(name=model) for model in forecasts),
        capacity={RegionGpu(region=region, gpu_type="H100"): gpus for region in REGIONS},
        profiles={ModelGpu(model=model, gpu_type="H100"): Profile(tokens_per_s=4000, gpus=2) for model in forecasts},
        present={EndpointGpu(model="A", region="east", gpu_type="H100"): 2},
        demand={
            Endpoint(model=model, region=region): tuple(share * value for value in forecast.windows_upper)
            for model, forecast in forecasts.items()
            for region, share in shares.items()
        },
        limits={},
        gpu_cost_per_hour={"H100": 3.0},
    )
