"""Fits: known coefficients come back, none is negative, and the published points give the published fits."""

import csv
import gzip
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from dataplane.scheduling.costs import LatencyModel
from dataplane.scheduling.fit import DecodePoint, LatencyFit, PrefillPoint, fit_latency

DATA = Path(os.environ.get("TIDEPOOL_DATA", Path(__file__).parents[4] / "shared" / "data")) / "aegaeon"
KNOWN = LatencyModel(
    prefill_base_s=5.7e-3,
    prefill_per_token_s=2.3e-5,
    prefill_per_token2_s=2.1e-10,
    decode_base_s=8.5e-3,
    decode_per_context_token_s=4.4e-8,
    decode_per_sequence_s=1.1e-4,
)
COEFFICIENTS = (
    "prefill_c0_s",
    "prefill_per_token_s",
    "prefill_per_sqtoken_s",
    "decode_c0_s",
    "decode_per_ctx_token_s",
    "decode_per_seq_s",
)
SHAPES = [(length, batch) for length in (16, 128, 512, 1024, 2048) for batch in (1, 2, 4, 8, 16)]


def measured(model: LatencyModel, noise: float = 0.0) -> LatencyFit:
    rng = np.random.default_rng(4)
    prefill, decode = [], []
    for length, batch in SHAPES:
        tokens, squared = length * batch, length * length * batch
        factors = 1 + noise * rng.standard_normal(2)
        seconds = model.prefill_s(tokens, squared) * factors[0]
        prefill.append(PrefillPoint(tokens=tokens, squared_tokens=squared, seconds=seconds))
        decode.append(
            DecodePoint(context_tokens=tokens, batch=batch, seconds=model.decode_s(tokens, batch) * factors[1])
        )
    return fit_latency(prefill, decode)


def test_known_coefficients_come_back() -> None:
    fit = measured(KNOWN)
    for name in LatencyModel.__dataclass_fields__:
        assert getattr(fit.latency, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6)
    assert fit.prefill_r2 == pytest.approx(1.0)
    assert fit.decode_r2 == pytest.approx(1.0)
    assert max(fit.prefill_mape, fit.decode_mape) < 1e-9
    assert (fit.prefill_points, fit.decode_points) == (25, 25)


def test_noise_shows_in_the_error_and_little_in_the_coefficients() -> None:
    fit = measured(KNOWN, noise=0.02)
    assert fit.latency.prefill_per_token_s == pytest.approx(KNOWN.prefill_per_token_s, rel=0.05)
    assert fit.latency.decode_base_s == pytest.approx(KNOWN.decode_base_s, rel=0.05)
    assert 0.005 < fit.decode_mape < 0.03
    assert 0.99 < fit.prefill_r2 < 1.0


def test_what_would_be_negative_is_left_out() -> None:
    points = [(tokens, 1e-3 + 1e-5 * tokens - 1e-10 * tokens**2) for tokens in (64, 256, 1024, 4096, 8192)]
    prefill = [PrefillPoint(tokens=t, squared_tokens=t * t, seconds=s) for t, s in points]
    decode = [DecodePoint(context_tokens=t, batch=1, seconds=1e-2) for t in (1, 2, 3)]
    fit = fit_latency(prefill, decode)
    assert fit.latency.prefill_per_token2_s == 0.0
    inputs = np.array([[1.0, t] for t, _ in points])
    plain = np.linalg.lstsq(inputs, np.array([s for _, s in points]), rcond=None)[0]
    assert fit.latency.prefill_per_token_s == pytest.approx(plain[1], rel=1e-6)
    assert fit.latency.decode_s(2, 1) == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("count", "seconds", "message"), [(2, 1.0, "2 prefill points"), (3, 0.0, "prefill point took")]
)
def test_points_that_say_nothing_are_refused(count: int, seconds: float, message: str) -> None:
    points = [PrefillPoint(tokens=i + 1, squared_tokens=i + 1, seconds=seconds) for i in range(count)]
    with pytest.raises(ValueError, match=message):
        fit_latency(points, [])


Key = tuple[str, str, str, str]


def _key(row: dict[str, str]) -> Key:
    return row["set"], row["model"], row["device"], row["tp"]


def _published() -> tuple[dict[Key, dict[str, str]], dict[Key, list[dict[str, str]]]]:
    """Fits and points of each measured set, truncated points left out."""
    with (DATA / "fitted_coefficients.csv").open(newline="") as file:
        fits = {_key(row): row for row in csv.DictReader(file)}
    points = defaultdict(list)
    with gzip.open(DATA / "latency_profiles.csv.gz", "rt", newline="") as file:
        for row in csv.DictReader(file):
            fit = fits.get(_key(row))
            whole = int(row["input_len"]) * int(row["batch_size"]) <= 4096
            if fit and (whole or fit["truncated_beyond_4096_tokens"] == "0"):
                points[_key(row)].append(row)
    return fits, points


@pytest.mark.skipif(not DATA.exists(), reason=f"no published latency profiles at {DATA} (set TIDEPOOL_DATA)")
def test_published_points_fit_as_published() -> None:
    """Where the published fit has no negative coefficient the two agree; elsewhere R^2 stays close."""
    fits, points = _published()
    assert len(fits) > 90
    alike = 0
    for key, row in fits.items():
        shapes = [(int(p["input_len"]), int(p["batch_size"]), p) for p in points[key]]
        fit = fit_latency(
            [
                PrefillPoint(tokens=n * b, squared_tokens=n * n * b, seconds=float(p["prefill_avg_s"]))
                for n, b, p in shapes
            ],
            [DecodePoint(context_tokens=n * b, batch=b, seconds=float(p["decode_avg_s"])) for n, b, p in shapes],
        )
        assert fit.prefill_points == int(row["n_used"])
        if min(float(row[name]) for name in COEFFICIENTS) >= 0:
            alike += 1
            assert fit.latency.prefill_per_token_s == pytest.approx(float(row["prefill_per_token_s"]), rel=1e-2)
            assert fit.prefill_r2 == pytest.approx(float(row["prefill_r2"]), abs=2e-3)
            assert fit.decode_r2 == pytest.approx(float(row["decode_r2"]), abs=2e-3)
        if float(row["prefill_r2"]) > 0.95:  # a form that fits at all: what is left out costs little
            assert fit.prefill_r2 > float(row["prefill_r2"]) - 0.02
    assert alike > 20
