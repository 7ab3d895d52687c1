"""Forecasts of hourly peaks by models of statsforecast, in an environment that has it: this file imports nothing of
Tidepool's, and runs by its path.

It reads a list of series from standard input, each with its `peaks` by hour and the number of the `first` hour to
forecast, and writes for each series what each model says of every hour from there on, one hour ahead, fitted anew on
the hours before; its seconds; and how often it failed, where the last hour's peak is taken.
"""

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

DAY = 24
TSB_ALPHA = 0.2
"""Of demand and of its probability: the library does not optimize them."""


def models() -> Mapping[str, Callable[[], Any]]:
    """By name. Croston and TSB are for intermittent demand; AutoTheta and MSTL know the day."""
    from statsforecast.models import MSTL, TSB, AutoETS, AutoTheta, CrostonOptimized  # noqa: PLC0415

    return {
        "AutoTheta": lambda: AutoTheta(season_length=DAY),
        "MSTL + ETS": lambda: MSTL(season_length=DAY, trend_forecaster=AutoETS(model="ZZN")),
        "CrostonOptimized": CrostonOptimized,
        "TSB": lambda: TSB(alpha_d=TSB_ALPHA, alpha_p=TSB_ALPHA),
    }


def forecasts(make: Callable[[], Any], peaks: Any, first: int) -> dict[str, Any]:
    """One model on one series."""
    began_s, found, failures = time.perf_counter(), [], 0
    for hour in range(first, len(peaks)):
        try:
            value = float(make().forecast(y=peaks[:hour], h=1)["mean"][0])
            if math.isnan(value):
                raise ValueError("no number")
        except Exception:  # whatever a model cannot do with a series
            value, failures = float(peaks[hour - 1]), failures + 1
        found.append(max(0.0, value))
    return {"peaks": found, "seconds": time.perf_counter() - began_s, "failures": failures}


def main() -> None:
    """Answer the series on standard input."""
    import numpy as np  # noqa: PLC0415

    warnings.simplefilter("ignore")
    known = models()
    answers = []
    for series in json.load(sys.stdin):
        peaks = np.array(series["peaks"], dtype=np.float64)
        answers.append({name: forecasts(make, peaks, series["first"]) for name, make in known.items()})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
