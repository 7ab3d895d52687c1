"""What a picture of a plan is made of: demand around the origin, the forecast's windows, capacity before and after."""

from typing import Any

import numpy as np
import pytest

from ops.cli.plan_plot import plan_panels
from ops.client.api import Api, CommandError

ORIGIN_S = 1_000_000_800
WINDOW_S = ORIGIN_S + 600
CELLS = [
    {"model": "m", "region": "east", "gpu_type": "H800", "before": 1, "after": 3},
    {"model": "m", "region": "east", "gpu_type": "A100", "before": 2, "after": 0},
    {"model": "n", "region": "west", "gpu_type": "H800", "before": 0, "after": 1},
]
PLAN = {"plan": {"id": "plan_1", "window_start_s": WINDOW_S}, "entries": CELLS}


class FakeApi(Api):
    """Answers as the admin API does; `inputs` None: a plan that no solver made."""

    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs

    def get(self, path: str, **query: Any) -> Any:
        if path.endswith("/inputs"):
            if self.inputs is None:
                raise CommandError("no inputs", status=404)
            return self.inputs
        if path == "/admin/forecasts":
            return {"data": [{"model": "m", "region": "east", "path": [50.0, 200.0]}]}
        points = [{"start_s": s, "tokens_per_s": float(s % 7)} for s in range(query["since_s"], query["until_s"], 60)]
        return {"data": points[:10] + points[15:], "since_s": query["since_s"], "until_s": query["until_s"]}

    def pages(self, path: str, **query: Any) -> Any:
        rates = (("m", "H800", 100.0), ("m", "A100", 10.0), ("n", "H800", 7.0))
        return {"data": [{"model": m, "gpu_type": g, "tokens_per_s": rate} for m, g, rate in rates]}


def series(model: str, region: str, stand_in: str | None = None) -> dict[str, Any]:
    return {"model": model, "region": region, "peak_q50": 100.0, "peak_upper": 200.0, "stand_in": stand_in}


INPUTS = {
    "forecasts": {
        "origin_s": ORIGIN_S,
        "quantile": 0.95,
        "series": [series("m", "east"), series("n", "west", "late; the last hour")],
    }
}


def test_a_plan_with_its_forecasts() -> None:
    [m, n], endpoints, quantile = plan_panels(FakeApi(INPUTS), PLAN, model=None, region=None, hours=2)
    assert (endpoints, quantile, m.title) == (2, 0.95, "m in east")
    assert [(band.start_s - ORIGIN_S, band.q50, band.upper) for band in m.forecast] == [
        (0, 25.0, 50.0),
        (1800, 100.0, 200.0),
    ]
    assert [(step.tokens_per_s, step.instances) for step in m.capacity] == [(120.0, 3), (300.0, 3)]
    assert [(step.start_s, step.end_s) for step in m.capacity] == [
        (ORIGIN_S - 3600, WINDOW_S),
        (WINDOW_S, WINDOW_S + 3600),
    ]
    assert m.history is not None
    assert m.actual is not None
    assert (m.history.start_s[0], m.actual.start_s[0]) == (ORIGIN_S - 7200, ORIGIN_S)
    assert np.isnan(m.history.tokens_per_s[2]), "five minutes without a point are a gap"
    assert np.isnan(m.history.tokens_per_s).sum() == 1
    first = [s % 7 for s in range(ORIGIN_S - 7200, ORIGIN_S - 6900, 60)]
    assert m.history.tokens_per_s[0] == pytest.approx(np.mean(first))
    assert [(band.q50, band.upper) for band in n.forecast] == [(100.0, 200.0)], "what stood in has no windows"
    assert n.note == "late; the last hour"


def test_a_plan_without_inputs_and_a_filter() -> None:
    [panel], endpoints, _ = plan_panels(FakeApi(None), PLAN, model="n", region=None, hours=1)
    assert (endpoints, panel.title, panel.forecast) == (1, "n in west", [])
    assert panel.origin_s == WINDOW_S
    assert plan_panels(FakeApi(INPUTS), PLAN, model=None, region="mars", hours=1)[0] == []
