from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

import ops.plots.forecast_plot
from ops.plots.forecast_plot import ForecastPanel, ReliabilityPanel, draw_forecasts
from ops.plots.panels import Curve

START_S = 1_731_283_200.0


def panel(title: str = "llama in us", peak: float = 1e4, **changes: object) -> ForecastPanel:
    start_s = START_S + 300.0 * np.arange(288)
    rates = peak * (1 + np.sin(np.arange(288) / 46)) / 2
    rates[100:110] = np.nan
    origins = START_S + 3600.0 * np.arange(12, 24)
    facts: dict[str, object] = {
        "title": title,
        "demand": Curve(start_s=start_s, tokens_per_s=rates, bucket_s=300.0),
        "origin_s": origins,
        "horizon_s": 3600.0,
        "peak_q50": np.full(12, peak / 2),
        "peak_upper": np.full(12, peak),
        "actual_peak": np.full(12, peak / 3),
        "error": 0.1,
        "coverage": 0.9,
        "pinball": 0.034,
    }
    return ForecastPanel(**(facts | changes))


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    assert draw_forecasts([panel()], path, title="Backtest", quantile=0.9) == 0
    assert path.stat().st_size > 10_000


def test_the_picture_says_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    draw_forecasts([panel("a $x_ in <us>")], path, title="Backtest of 100 %", quantile=0.95)
    text = path.read_text()
    for words in (
        "Backtest of 100 %",
        "a $x_ in &lt;us&gt;",
        "error 10.0%, q95 covers 90.0%, pinball loss 3.4%",
        "input tokens/s",
        "UTC",
    ):
        assert f"<!-- {words}" in text or words in text, words
    for words in ("history", "actual demand", "forecast, q50 to q95", "actual peak"):
        assert words in text, words


def test_the_largest_series_are_drawn_and_the_others_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.plots.forecast_plot, "PANELS_MAX", 2)
    path = tmp_path / "a.svg"
    panels = [panel(f"number {i} there", peak=100.0 + i) for i in range(5)]
    assert draw_forecasts(panels, path, title="T", quantile=0.9) == 3
    text = path.read_text()
    assert "number 4 there" in text
    assert "number 2 there" not in text
    assert "the 2 largest of 5 series" in text


def test_reliability_is_drawn_below_the_series(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    levels = (0.1, 0.5, 0.9)
    reliability = ReliabilityPanel(hours=120, levels=levels, covered=(0.2, 0.5, 0.8), upper=(0.9, 0.91))
    draw_forecasts([panel("s")], path, title="T", quantile=0.9, reliability=reliability)
    text = path.read_text()
    for words in ("Reliability, 120 hours", "requested share of hours", "covered share", "upper quantile"):
        assert words in text, words


def test_unknown_is_drawn_as_nothing(tmp_path: Path) -> None:
    """No forecast, no outcome, no demand, and a name whose letters the font lacks."""
    unknown = np.full(12, np.nan)
    silent = Curve(start_s=START_S + 300.0 * np.arange(288), tokens_per_s=np.full(288, np.nan), bucket_s=300.0)
    changes = {
        "peak_q50": unknown,
        "peak_upper": unknown,
        "actual_peak": unknown,
        "error": None,
        "coverage": None,
        "pinball": None,
    }
    path = tmp_path / "a.png"
    draw_forecasts([panel("模型"), panel(**changes), panel(demand=silent)], path, title="T", quantile=0.9)
    assert imread(path).shape[2] == 4
