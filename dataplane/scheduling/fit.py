"""Latency models from measured points, by least squares with no negative coefficient (Aegaeon A.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from dataplane.scheduling.costs import LatencyModel

POINTS_MIN = 3
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PrefillPoint:
    """A measured prefill of prompts of `tokens` in total, `squared_tokens` the sum of their squared lengths."""

    tokens: int
    squared_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class DecodePoint:
    """A measured decode step of `batch` sequences whose contexts hold `context_tokens` in total."""

    context_tokens: int
    batch: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LatencyFit:
    """A fit and its quality: R^2, and the mean absolute error as a share of the measured time (MAPE, 0.05 is 5 %)."""

    latency: LatencyModel
    prefill_r2: float
    decode_r2: float
    prefill_mape: float
    decode_mape: float
    prefill_points: int
    decode_points: int


def fit_latency(prefill_points: Sequence[PrefillPoint], decode_points: Sequence[DecodePoint]) -> LatencyFit:
    """The best fit.

    Raises:
        ValueError: fewer than three points of a kind, or a time that is not over 0.
    """
    prefill = _fit("prefill", [(p.tokens, p.squared_tokens, p.seconds) for p in prefill_points])
    decode = _fit("decode", [(p.context_tokens, p.batch, p.seconds) for p in decode_points])
    return LatencyFit(
        latency=LatencyModel(
            prefill_base_s=prefill.coefficients[0],
            prefill_per_token_s=prefill.coefficients[1],
            prefill_per_token2_s=prefill.coefficients[2],
            decode_base_s=decode.coefficients[0],
            decode_per_context_token_s=decode.coefficients[1],
            decode_per_sequence_s=decode.coefficients[2],
        ),
        prefill_r2=prefill.r2,
        decode_r2=decode.r2,
        prefill_mape=prefill.mape,
        decode_mape=decode.mape,
        prefill_points=len(prefill_points),
        decode_points=len(decode_points),
    )


@dataclass(frozen=True, kw_only=True)
class _Fit:
    coefficients: tuple[float, float, float]
    r2: float
    mape: float


def _fit(kind: str, points: Sequence[tuple[int, int, float]]) -> _Fit:
    if len(points) < POINTS_MIN:
        raise ValueError(f"{len(points)} {kind} points; at least {POINTS_MIN} are needed")
    table = np.array(points, dtype=np.float64)
    measured = table[:, 2]
    if not (measured > 0).all():
        raise ValueError(f"a {kind} point took {measured.min()} s; it must be over 0")
    inputs = np.column_stack([np.ones(len(points)), table[:, :2]])
    coefficients = _non_negative_least_squares(inputs, measured)
    errors = inputs @ coefficients - measured
    spread = float(((measured - measured.mean()) ** 2).sum())
    base, first, second = (float(value) for value in coefficients)
    return _Fit(
        coefficients=(base, first, second),
        r2=1.0 - float((errors**2).sum()) / spread if spread else 1.0,
        mape=float((np.abs(errors) / measured).mean()),
    )


def _non_negative_least_squares(inputs: Floats, measured: Floats) -> Floats:
    """The best non-negative coefficients [columns] for `inputs` [points, columns].

    The optimum is plain least squares on its non-zero columns, so all subsets of columns are tried.
    """
    columns = inputs.shape[1]
    scale = np.maximum(np.abs(inputs).max(axis=0), 1.0)
    best, best_error = np.zeros(columns), float((measured**2).sum())
    for size in range(1, columns + 1):
        for subset in map(list, combinations(range(columns), size)):
            solved = np.linalg.lstsq(inputs[:, subset] / scale[subset], measured, rcond=None)[0] / scale[subset]
            error = float(((inputs[:, subset] @ solved - measured) ** 2).sum())
            if (solved >= 0).all() and error < best_error:
                best, best_error = np.zeros(columns), error
                best[subset] = solved
    return best
