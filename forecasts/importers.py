"""Recorded demand from files: a plain CSV, and two public traces in the form they are published in.

Each reader takes a path (`.gz` is unpacked) and gives rows of demand; a missing value is a gap. What cannot be read is
refused with the file, the line and the column.
"""

import csv
import gzip
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, TypeVar

from forecasts.series import DemandRow

AZURE_CODING_INPUT_TOKENS = 2560.0
MINUTE_S = 60.0

Value = TypeVar("Value")


class DemandFileError(ValueError):
    """A demand file that cannot be read; the message names file, line and column."""


def read_demand_csv(path: Path) -> list[DemandRow]:
    """Rows of a CSV with the columns start_s (Unix time), region, model, tokens_per_s; an empty value is a gap.

    Raises:
        DemandFileError: a column is missing, or a value is no number, negative or empty where it must not be.
    """
    return [
        DemandRow(
            start_s=line.number("start_s"),
            region=line.word("region"),
            model=line.word("model"),
            tokens_per_s=line.amount("tokens_per_s"),
        )
        for line in _lines(path, ("start_s", "region", "model", "tokens_per_s"))
    ]


def read_sageserve_week(
    path: Path, *, start_s: float = 0.0, region: str = "all", workload: str = "prod"
) -> list[DemandRow]:
    """SageServe's week of November 2024: prompt tokens per minute and model, all regions summed.

    Args:
        path: columns minute, model, workload, prompt_tokens_per_min; minute 0 is a Monday's first.
        start_s: Unix time to give minute 0.
        region: the region to name.
        workload: "prod" is the interactive one, "dev" the other.

    Raises:
        DemandFileError: as for `read_demand_csv`, or the file holds no row of that workload.
    """
    rows = []
    for line in _lines(path, ("minute", "model", "workload", "prompt_tokens_per_min")):
        if line.word("workload") == workload:
            tokens = line.amount("prompt_tokens_per_min")
            rows.append(
                DemandRow(
                    start_s=start_s + line.number("minute") * MINUTE_S,
                    region=region,
                    model=line.word("model"),
                    tokens_per_s=None if tokens is None else tokens / MINUTE_S,
                )
            )
    if not rows:
        raise DemandFileError(f"{path}: column workload: no row says {workload!r}")
    return rows


def read_azure_week(
    path: Path,
    *,
    region: str = "all",
    model: str = "coding",
    input_tokens_mean: float = AZURE_CODING_INPUT_TOKENS,
) -> list[DemandRow]:
    """Azure's week of May 2024, requests per 10 s, as demand per minute.

    A minute counts what is known in it; one without any value is a gap.

    Args:
        path: columns Time (UTC) and TIMESTAMP; the latter, so named in the source, is the number of requests.
        region: the region to name.
        model: the model to name.
        input_tokens_mean: input tokens of a mean request; the coding trace has about 2,560.

    Raises:
        DemandFileError: as for `read_demand_csv`.
    """
    requests: dict[float, list[float]] = {}
    for line in _lines(path, ("Time", "TIMESTAMP")):
        minute = requests.setdefault(line.time_s("Time") // MINUTE_S * MINUTE_S, [])
        count = line.amount("TIMESTAMP")
        if count is not None:
            minute.append(count)
    return [
        DemandRow(
            start_s=start_s,
            region=region,
            model=model,
            tokens_per_s=sum(counts) / (10.0 * len(counts)) * input_tokens_mean if counts else None,
        )
        for start_s, counts in sorted(requests.items())
    ]


class _Line:
    """One line of a file; its readers say where a bad value stands."""

    def __init__(self, path: Path, number: int, fields: dict[str, str]) -> None:
        self._path = path
        self._number = number
        self._fields = fields

    def word(self, column: str) -> str:
        text = self._fields[column].strip()
        if not text:
            raise self._error(column, "is empty")
        return text

    def number(self, column: str) -> float:
        return self._converted(column, float, "is no number")

    def amount(self, column: str) -> float | None:
        if not self._fields[column].strip():
            return None
        amount = self.number(column)
        if amount < 0 or not math.isfinite(amount):
            raise self._error(column, f"must be finite and not negative, is {amount}")
        return amount

    def time_s(self, column: str) -> float:
        return self._converted(column, _unix_time_s, "is no time like 2024-05-10 00:00:00")

    def _converted(self, column: str, convert: Callable[[str], Value], complaint: str) -> Value:
        text = self.word(column)
        try:
            return convert(text)
        except ValueError as error:
            raise self._error(column, f"{complaint}: {text!r}") from error

    def _error(self, column: str, complaint: str) -> DemandFileError:
        return DemandFileError(f"{self._path}: line {self._number}: column {column} {complaint}")


def _unix_time_s(text: str) -> float:
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _lines(path: Path, columns: tuple[str, ...]) -> Iterator[_Line]:
    try:
        with _opened(path) as file:
            reader = csv.reader(file)
            header = next(reader, [])
            missing = [column for column in columns if column not in header]
            if missing:
                raise DemandFileError(f"{path}: line 1: column {missing[0]} is missing; found: {', '.join(header)}")
            for fields in reader:
                if len(fields) != len(header):
                    complaint = f"{len(fields)} columns, the header has {len(header)}"
                    raise DemandFileError(f"{path}: line {reader.line_num}: {complaint}")
                yield _Line(path, reader.line_num, dict(zip(header, fields, strict=True)))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise DemandFileError(f"{path}: {error}") from error


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")
