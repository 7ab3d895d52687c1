from pathlib import Path

import numpy as np
import pytest

import ops.plots.plan_plot
from ops.plots.panels import Curve, PlotError
from ops.plots.plan_plot import Band, Capacity, PlanPanel, draw_plan, total_panel

ORIGIN_S = 1_731_283_200.0


def curve(first_s: float, *rates: float) -> Curve:
    return Curve(start_s=first_s + 60.0 * np.arange(len(rates)), tokens_per_s=np.array(rates), bucket_s=60.0)


def panel(title: str = "llama in us", scale: float = 1.0) -> PlanPanel:
    return PlanPanel(
        title=title,
        origin_s=ORIGIN_S,
        history=curve(ORIGIN_S - 120, scale, np.nan),
        actual=curve(ORIGIN_S, 2 * scale),
        forecast=[
            Band(start_s=ORIGIN_S + 300 * i, end_s=ORIGIN_S + 300 * (i + 1), q50=scale, upper=2 * scale) for i in (0, 1)
        ],
        capacity=[
            Capacity(start_s=ORIGIN_S - 3600, end_s=ORIGIN_S, tokens_per_s=scale, instances=1),
            Capacity(start_s=ORIGIN_S, end_s=ORIGIN_S + 3600, tokens_per_s=3 * scale, instances=3),
        ],
        note="home demand",
    )


def test_a_plan_is_drawn_with_all_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    assert draw_plan([panel(), panel("b in us")], path, title="Plan plan_1", quantile=0.9) == 0
    text = path.read_text()
    for words in (
        "Plan plan_1",
        "llama in us   home demand",
        "b in us",
        "history",
        "actual demand",
        "forecast, q50 to q90",
    ):
        assert words in text, words
    for words in ("capacity placed", "1 instance", "3 instances", "planned here", "input tokens/s"):
        assert words in text, words


def test_parts_may_be_unknown_but_not_all(tmp_path: Path) -> None:
    bare = PlanPanel(title="new", origin_s=ORIGIN_S, history=None, actual=None, forecast=(), capacity=())
    some = PlanPanel(title="new", origin_s=ORIGIN_S, history=None, actual=None, forecast=panel().forecast, capacity=())
    assert draw_plan([some], tmp_path / "a.png", title="T", quantile=0.9) == 0
    with pytest.raises(PlotError, match="new: there is nothing to draw"):
        draw_plan([bare], tmp_path / "b.png", title="T", quantile=0.9)
    with pytest.raises(PlotError, match="no endpoint"):
        draw_plan([], tmp_path / "b.png", title="T", quantile=0.9)


def test_a_long_plan_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.plots.plan_plot, "PANELS_MAX", 2)
    path = tmp_path / "a.svg"
    assert draw_plan([panel(f"e{i}") for i in range(4)], path, title="T", quantile=0.9) == 2
    assert "the first 2 of 4" in path.read_text()


def test_endpoints_add_up_and_a_gap_of_one_is_not_a_gap_of_all() -> None:
    longer = PlanPanel(**(vars(panel(scale=10.0)) | {"history": curve(ORIGIN_S - 180, 5, 10, 10)}))
    total = total_panel([panel(), longer], "all")
    assert total.history is not None
    np.testing.assert_array_equal(total.history.start_s, ORIGIN_S - np.array([180, 120, 60]))
    np.testing.assert_array_equal(total.history.tokens_per_s, [5, 11, 10])
    assert [(band.q50, band.upper) for band in total.forecast] == [(11, 22), (11, 22)]
    assert [(step.tokens_per_s, step.instances) for step in total.capacity] == [(11, 2), (33, 6)]
