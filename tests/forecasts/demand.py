"""Made-up demand for the tests of forecasts."""

import numpy as np

from forecasts.series import DemandSeries, FloatArray


def minutes(values: FloatArray | list[float]) -> DemandSeries:
    return DemandSeries(start_s=0, bucket_s=60, values=np.asarray(values, dtype=np.float64))


def hourly(*peaks: float) -> DemandSeries:
    """Five-minute buckets; each hour is at its given value throughout."""
    return DemandSeries(start_s=0, bucket_s=300, values=np.repeat(np.array(peaks, dtype=np.float64), 12))


def noisy_days(hours: float, seed: int = 1) -> FloatArray:
    """Values per minute with a day's rhythm and noise."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(hours * 60)) / 1440
    return np.asarray(1000 * (1.2 + np.sin(2 * np.pi * time)) * np.exp(rng.normal(0, 0.2, len(time))))
