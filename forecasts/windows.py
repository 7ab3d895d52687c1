"""Statistics of the buckets before and after every origin of a series, vectorized.

Origin n is before bucket n, so that a series of `buckets` values has buckets + 1 origins:

    origin      0     1     2     3
    bucket      | v0  | v1  | v2  |
    trailing(count=2) at origin 2: v0, v1          next(count=1) at origin 2: v2
"""

import numpy as np

from forecasts.series import FloatArray


def trailing_mean(values: FloatArray, count: int) -> FloatArray:
    """Mean of the known values of the `count` buckets before each origin, NaN without any; shape (buckets + 1,)."""
    known = ~np.isnan(values)
    sums = np.append(0.0, np.cumsum(np.where(known, values, 0.0)))
    counts = np.append(0, np.cumsum(known))
    first = np.maximum(np.arange(len(values) + 1) - count, 0)
    found = counts - counts[first]
    return np.asarray(np.where(found > 0, (sums - sums[first]) / np.maximum(found, 1), np.nan))


def trailing_max(values: FloatArray, count: int) -> FloatArray:
    """Largest known value of the `count` buckets before each origin, NaN without any; shape (buckets + 1,)."""
    return _maxima(_before(values, count))


def next_max(values: FloatArray, count: int) -> FloatArray:
    """Largest known value of the `count` buckets after each origin, NaN if fewer follow; shape (buckets + 1,)."""
    result = np.full(len(values) + 1, np.nan)
    if len(values) >= count:
        result[: len(values) - count + 1] = _maxima(np.lib.stride_tricks.sliding_window_view(values, count))
    return result


def days_before(values: FloatArray, per_day: int, days: int) -> FloatArray:
    """Row n holds the values n + 1 days earlier, NaN before the start; shape (days, len(values))."""
    table = np.full((days, len(values)), np.nan)
    for day in range(1, days + 1):
        if day * per_day < len(values):
            table[day - 1, day * per_day :] = values[: -day * per_day]
    return table


def forward_filled(values: FloatArray, count: int) -> FloatArray:
    """Gaps filled with the last known value, for at most `count` buckets after it."""
    indices = np.arange(len(values))
    newest = np.maximum.accumulate(np.where(np.isnan(values), -1, indices))
    near = (newest >= 0) & (indices - newest <= count)
    return np.where(near, values[np.maximum(newest, 0)], np.nan)


def known_mean(table: FloatArray) -> FloatArray:
    """Mean of the known values of each column, NaN without any; shape (columns,)."""
    return _means(table.T)


def _before(values: FloatArray, count: int) -> FloatArray:
    padded = np.concatenate([np.full(count, np.nan), values])
    return np.lib.stride_tricks.sliding_window_view(padded, count)


def _means(table: FloatArray) -> FloatArray:
    known = ~np.isnan(table)
    counts = known.sum(axis=1)
    return np.where(counts > 0, np.where(known, table, 0.0).sum(axis=1) / np.maximum(counts, 1), np.nan)


def _maxima(table: FloatArray) -> FloatArray:
    maxima = np.where(np.isnan(table), -np.inf, table).max(axis=1, initial=-np.inf)
    return np.asarray(np.where(np.isneginf(maxima), np.nan, maxima))
