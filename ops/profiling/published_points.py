"""Measured points from a CSV file as Aegaeon's artifact publishes, grouped into the sets that are fitted together.

A row is one model on `tp` GPUs of a type: a prefill of `batch_size` prompts of `input_len` tokens, and a decode step
with them as context. Columns of percentiles are accepted and not used.
"""

import csv
import gzip
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataplane.scheduling.fit import DecodePoint, PrefillPoint

COLUMNS = ("set", "model", "device", "tp", "input_len", "batch_size", "prefill_avg_s", "decode_avg_s")
UNUSED_COLUMNS = ("prefill_p50_s", "prefill_p90_s", "decode_p50_s", "decode_p90_s")
CHUNK_TOKENS = 4096
TRUNCATED_RATIO = 1.4
"""If the longest prefill above a chunk took less than this many times that of one chunk, only one chunk was run."""

_BILLIONS = re.compile(r"[-_](\d+(?:\.\d+)?)b(?=[-_]|$)")


@dataclass(frozen=True, kw_only=True)
class PointSet:
    """Points of one model on `gpus` GPUs of a type. `dropped`: points that ran fewer tokens than their row states."""

    source: str
    model: str
    gpu_type: str
    gpus: int
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    dropped: int

    @property
    def weights_bytes(self) -> int | None:
        """Two bytes per parameter by the model's name; None if it has no size, or the active one of a mixture only."""
        billions = _BILLIONS.search(self.model.lower())
        if billions is None or "moe" in self.model.lower():
            return None
        return round(float(billions[1]) * 2e9)


@dataclass(frozen=True, kw_only=True)
class _Row:
    length: int
    batch: int
    prefill_s: float
    decode_s: float

    @property
    def tokens(self) -> int:
        return self.length * self.batch


def read_points(file: Path) -> list[PointSet]:
    """All sets of a CSV file, plain or gzipped, in the order of their first rows.

    Raises:
        ValueError: columns are missing or unknown, or a value is no number; the message has file and line.
    """
    groups: dict[tuple[str, str, str, str], list[_Row]] = defaultdict(list)
    try:
        with gzip.open(file, "rt", newline="") if file.suffix == ".gz" else file.open(newline="") as opened:
            reader = csv.DictReader(opened)
            _check_columns(file, reader.fieldnames or ())
            for row in reader:
                groups[row["set"], row["model"], row["device"], row["tp"]].append(_row(file, reader.line_num, row))
        return [_point_set(*key, rows) for key, rows in groups.items()]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error


def _check_columns(file: Path, names: Sequence[str]) -> None:
    missing = [name for name in COLUMNS if name not in names]
    unknown = [name for name in names if name not in COLUMNS + UNUSED_COLUMNS]
    if missing or unknown:
        faults = [f"{what} {', '.join(found)}" for what, found in (("missing", missing), ("unknown", unknown)) if found]
        raise ValueError(f"{file}: columns {'; '.join(faults)}; expected are {', '.join(COLUMNS)}")


def _row(file: Path, line: int, row: dict[str, str]) -> _Row:
    try:
        int(row["tp"])
        return _Row(
            length=int(row["input_len"]),
            batch=int(row["batch_size"]),
            prefill_s=float(row["prefill_avg_s"]),
            decode_s=float(row["decode_avg_s"]),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: line {line}: {error}") from error


def _point_set(name: str, model: str, device: str, gpus: str, rows: list[_Row]) -> PointSet:
    kept = [row for row in rows if row.tokens <= CHUNK_TOKENS] if _truncated(rows) else rows
    return PointSet(
        source=f"{name}/{model}/{device}/{gpus}",
        model=model,
        gpu_type=device,
        gpus=int(gpus),
        prefill=tuple(
            PrefillPoint(tokens=row.tokens, squared_tokens=row.tokens * row.length, seconds=row.prefill_s)
            for row in kept
        ),
        decode=tuple(DecodePoint(context_tokens=row.tokens, batch=row.batch, seconds=row.decode_s) for row in kept),
        dropped=len(rows) - len(kept),
    )


def _truncated(rows: list[_Row]) -> bool:
    """Whether prefills of more than a chunk were truncated to one, by their times.

    In the published data the ratio is at most 1.28 for truncated ones, and at least 1.55 for others.
    """
    chunk_s = max((row.prefill_s for row in rows if row.tokens == CHUNK_TOKENS), default=0.0)
    above_s = max((row.prefill_s for row in rows if row.tokens > CHUNK_TOKENS), default=math.inf)
    return above_s < TRUNCATED_RATIO * chunk_s
