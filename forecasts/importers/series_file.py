"""All series of a demand CSV, with the bucket width derived from their times."""

import math
from array import array
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forecasts.importers.lines import DemandFileError, Progress, no_progress, open_csv
from forecasts.series import DemandSeries, FloatArray

BUCKETS_MAX = 4_000_000
"""Most buckets of one series, gaps included: one wrong time must not take all memory."""

_COLUMNS = ("start_s", "region", "model", "tokens_per_s")
_TIME_TOLERANCE_S = 1e-3
_MIXED_RUN = 10

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class EndpointSeries:
    """One endpoint of the file. `series` starts at its first time in the file; a bucket without a row is a gap."""

    region: str
    model: str
    series: DemandSeries

    @property
    def name(self) -> str:
        return f"{self.model} in {self.region}"


class _Rows:
    """The rows of one series in the order of the file: 24 bytes each."""

    def __init__(self) -> None:
        self.start_s = array("d")
        self.tokens_per_s = array("d")
        self.lines = array("q")


def read_series(path: Path, progress: Progress = no_progress) -> list[EndpointSeries]:
    """The series of a CSV with start_s (Unix time), region, model, tokens_per_s, rows in any order; empty = a gap.

    A series' bucket is the least time between two of its rows, and every row is a whole number of buckets after the
    first. Series may have different buckets.

    Returns:
        Series by region and model.

    Raises:
        DemandFileError: a value cannot be read, there is no row, a row is repeated, or a series has a single row, a row
            off its grid, or more than `BUCKETS_MAX` buckets.
    """
    found: defaultdict[tuple[str, str], _Rows] = defaultdict(_Rows)
    with open_csv(path, progress) as file:
        for line in file.lines(_COLUMNS):
            start_s = line.unix_time_s("start_s")
            rows = found[line.word("region"), line.word("model")]
            value = line.amount_or_gap("tokens_per_s")
            rows.start_s.append(start_s)
            rows.tokens_per_s.append(math.nan if value is None else value)
            rows.lines.append(line.number_in_file)
    if not found:
        raise DemandFileError(f"{path}: holds no demand: nothing after the header")
    return [
        EndpointSeries(region=region, model=model, series=_series(f"{path}: {model} in {region}", rows))
        for (region, model), rows in sorted(found.items())
    ]


def _series(where: str, rows: _Rows) -> DemandSeries:
    starts, lines = np.array(rows.start_s), np.array(rows.lines)
    order = np.argsort(starts, kind="stable")
    starts, lines = starts[order], lines[order]
    bucket_s = _bucket_s(where, starts, lines)
    indices = np.rint((starts - starts[0]) / bucket_s)
    off = np.abs(starts[0] + indices * bucket_s - starts) > _TIME_TOLERANCE_S
    if off.any():
        at = int(np.flatnonzero(off)[0])
        raise DemandFileError(
            f"{where}: line {lines[at]}: column start_s {starts[at]:.15g} is off the grid of {bucket_s:g} s (the least "
            f"time between two rows) that begins at {starts[0]:.15g}; one series has one bucket width"
        )
    _refuse_mixed(where, indices, starts, lines, bucket_s)
    if indices[-1] >= BUCKETS_MAX:
        raise DemandFileError(
            f"{where}: line {lines[-1]}: column start_s {starts[-1]:.15g} makes {indices[-1]:.3g} buckets of "
            f"{bucket_s:g} s, over the limit of {BUCKETS_MAX}; is a time wrong?"
        )
    values: FloatArray = np.full(int(indices[-1]) + 1, np.nan)
    values[indices.astype(np.int64)] = np.array(rows.tokens_per_s)[order]
    return DemandSeries(start_s=float(starts[0]), bucket_s=bucket_s, values=values)


def _refuse_mixed(where: str, indices: FloatArray, starts: FloatArray, lines: IntArray, bucket_s: float) -> None:
    """Refuse a long run of rows at a larger distance: longer buckets would be taken for gaps."""
    steps = np.diff(indices)
    changes = np.flatnonzero(np.diff(steps)) + 1
    begins, ends = np.append(0, changes), np.append(changes, len(steps))
    runs = np.flatnonzero((ends - begins >= _MIXED_RUN) & (steps[begins] > 1))
    if len(runs):
        at = begins[runs[0]]
        raise DemandFileError(
            f"{where}: line {lines[at]}: from start_s {starts[at]:.15g} on rows are {steps[at] * bucket_s:g} s apart, "
            f"others {bucket_s:g} s; one series has one bucket width"
        )


def _bucket_s(where: str, starts: FloatArray, lines: IntArray) -> float:
    if len(starts) < 2:
        raise DemandFileError(f"{where}: line {lines[0]}: one row does not define the bucket width; two are needed")
    steps = np.diff(starts)
    twice = np.flatnonzero(steps <= _TIME_TOLERANCE_S)
    if len(twice):
        first, second = sorted((lines[twice[0]], lines[twice[0] + 1]))
        raise DemandFileError(
            f"{where}: line {second}: column start_s {starts[twice[0]]:.15g} is repeated, first in line {first}"
        )
    return float(steps.min())
