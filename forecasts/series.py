"""Demand over time: equal buckets of input tokens per second, where a bucket without data is a gap and never a zero."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class DemandRow(NamedTuple):
    """One bucket of one endpoint's demand, from an importer or the generator. None = a gap."""

    start_s: float
    region: str
    model: str
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class DemandSeries:
    """One endpoint's demand. Bucket n covers [start_s + n * bucket_s, start_s + (n + 1) * bucket_s).

    Attributes:
        start_s: Unix time at which the first bucket begins.
        bucket_s: length of a bucket in seconds.
        values: shape (buckets,), input tokens per second, NaN = gap. A read-only copy is kept.
    """

    start_s: float
    bucket_s: float
    values: FloatArray

    def __post_init__(self) -> None:
        """Raises ValueError if bucket_s is not positive, or values are not 1-D, negative or infinite."""
        values = np.array(self.values, dtype=np.float64)
        if not self.bucket_s > 0:
            raise ValueError(f"bucket_s must be positive, got {self.bucket_s}")
        if values.ndim != 1:
            raise ValueError(f"values must have one dimension, got {values.ndim}")
        if np.isinf(values).any() or (values < 0).any():
            raise ValueError(
                f"values must be finite and not negative, got {values[np.isinf(values) | (values < 0)][0]}"
            )
        values.setflags(write=False)
        object.__setattr__(self, "values", values)

    @classmethod
    def from_rows(
        cls, rows: Iterable[tuple[float, float | None]], *, bucket_s: float = 60.0, end_s: float | None = None
    ) -> Self:
        """A series from (start_s, tokens_per_s) rows in any order; None, and every bucket without a row, is a gap.

        Args:
            rows: one row per bucket, each start_s a whole number of buckets after the first.
            bucket_s: length of a bucket in seconds.
            end_s: the end of the series, so that missing rows at the end are a gap; default: after the last row.

        Raises:
            ValueError: no rows, or a start_s that is off the grid, repeated, or at or after end_s.
        """
        ordered = sorted(rows, key=lambda row: row[0])
        if not ordered:
            raise ValueError("rows must hold at least one row")
        start_s = ordered[0][0]
        end_s = ordered[-1][0] + bucket_s if end_s is None else end_s
        values = np.full(round((end_s - start_s) / bucket_s), np.nan)
        seen: set[int] = set()
        for row_start_s, value in ordered:
            index = round((row_start_s - start_s) / bucket_s)
            if abs(start_s + index * bucket_s - row_start_s) > 1e-3:
                raise ValueError(f"start_s {row_start_s} is not a multiple of {bucket_s} s after {start_s}")
            if index in seen:
                raise ValueError(f"start_s {row_start_s} is repeated")
            if index >= len(values):
                raise ValueError(f"start_s {row_start_s} is not before end_s {end_s}")
            seen.add(index)
            values[index] = np.nan if value is None else value
        return cls(start_s=start_s, bucket_s=bucket_s, values=values)

    @property
    def end_s(self) -> float:
        """Unix time of the end of the last bucket: the origin of a forecast."""
        return self.start_s + len(self.values) * self.bucket_s

    @property
    def duration_s(self) -> float:
        return len(self.values) * self.bucket_s

    def buckets_in(self, span_s: float) -> int:
        """The number of whole buckets in a time span."""
        return int((span_s + 1e-6) // self.bucket_s)

    def rebin(self, bucket_s: float) -> "DemandSeries":
        """Longer buckets, each the mean of its known values; a bucket without any is a gap.

        They are aligned to the end, so that the newest one is whole; an incomplete oldest one is dropped.

        Raises:
            ValueError: bucket_s is not a whole multiple of the present one.
        """
        factor = round(bucket_s / self.bucket_s)
        if factor < 1 or abs(factor * self.bucket_s - bucket_s) > 1e-6:
            raise ValueError(f"bucket_s {bucket_s} is not a whole multiple of {self.bucket_s}")
        count = len(self.values) // factor
        table = self.values[len(self.values) - count * factor :].reshape(count, factor)
        known = ~np.isnan(table)
        counts = known.sum(axis=1)
        totals = np.where(known, table, 0.0).sum(axis=1)
        means = np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)
        return DemandSeries(start_s=self.end_s - count * bucket_s, bucket_s=bucket_s, values=means)

    def before(self, origin_s: float) -> "DemandSeries":
        """The buckets that ended by `origin_s`."""
        return self._cut(0, self._index(origin_s))

    def last(self, span_s: float) -> "DemandSeries":
        """The newest whole buckets within `span_s` seconds."""
        return self._cut(max(0, len(self.values) - self.buckets_in(span_s)), len(self.values))

    def maximum(self) -> float:
        """The largest known value; NaN without any."""
        known = self.values[~np.isnan(self.values)]
        return float(known.max()) if known.size else float("nan")

    def last_hour_max(self) -> float:
        """The largest known value of the last 60 minutes; NaN without any."""
        return self.last(3600.0).maximum()

    def _index(self, origin_s: float) -> int:
        return min(len(self.values), max(0, self.buckets_in(origin_s - self.start_s)))

    def _cut(self, first: int, end: int) -> "DemandSeries":
        start_s = self.start_s + first * self.bucket_s
        return DemandSeries(start_s=start_s, bucket_s=self.bucket_s, values=self.values[first:end])
