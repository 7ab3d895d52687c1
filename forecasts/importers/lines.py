"""Lines of a demand file and their values; errors name file, line and column."""

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

TIME_S_MAX = 253_402_300_799.0
"""The last second of the year 9999."""

_GZIP_MAGIC = b"\x1f\x8b"
_REPORT_LINES = 2_000
_SHOWN = 50

Progress = Callable[[int], None]
"""Called periodically with the bytes read of the file, in its compressed form."""


class DemandFileError(ValueError):
    """A demand file that cannot be read; the message names file, line and column."""


def no_progress(_: int) -> None:
    """Ignore the progress."""


class Line:
    """One line of a file. Its methods raise DemandFileError with the position of an invalid value."""

    __slots__ = ("_fields", "_indices", "_path", "number_in_file")

    def __init__(self, path: Path, number: int, fields: list[str], indices: Mapping[str, int]) -> None:
        self._path = path
        self.number_in_file = number
        self._fields = fields
        self._indices = indices

    def text(self, column: str) -> str:
        """The value without surrounding blanks."""
        return self._fields[self._indices[column]].strip()

    def word(self, column: str) -> str:
        """A name: not empty, and printable."""
        word = self.text(column)
        if not word:
            raise self.error(column, "is empty")
        if not word.isprintable():
            raise self.error(column, f"holds a character that cannot be printed: {word[:_SHOWN]!r}")
        return word

    def number(self, column: str) -> float:
        text = self._fields[self._indices[column]]
        try:
            number = float(text)
        except ValueError:
            raise self.error(column, f"is no number: {self.word(column)[:_SHOWN]!r}") from None
        if not math.isfinite(number):
            raise self.error(column, f"must be finite, is {number}")
        return number

    def amount(self, column: str) -> float:
        """A number that is not negative."""
        amount = self.number(column)
        if amount < 0:
            raise self.error(column, f"must be finite and not negative, is {amount}")
        return amount

    def integers(self, column: str) -> tuple[int, ...]:
        """A list of whole numbers; empty if the field is."""
        text = self.text(column)
        try:
            numbers = json.loads(text) if text else []
        except (ValueError, RecursionError):
            numbers = None
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise self.error(column, f"is no list of whole numbers: {text[:_SHOWN]!r}")
        return tuple(numbers)

    def amount_or_gap(self, column: str) -> float | None:
        """None if the field is empty."""
        return self.amount(column) if self.text(column) else None

    def unix_time_s(self, column: str) -> float:
        """A Unix time from 0 to the year 9999."""
        time_s = self.number(column)
        if not 0 <= time_s <= TIME_S_MAX:
            raise self.error(column, f"must be a Unix time from 0 to {TIME_S_MAX:.0f}, is {self.text(column)[:_SHOWN]}")
        return time_s

    def time_after_s(self, start_s: float, column: str, unit_s: float) -> float:
        """The Unix time of so many units after a start, up to the year 9999."""
        time_s = start_s + self.amount(column) * unit_s
        if time_s > TIME_S_MAX:
            raise self.error(column, f"is after the year 9999: {self.text(column)[:_SHOWN]}")
        return time_s

    def date_time_s(self, column: str) -> float:
        """A date and time, in UTC if it has no zone, as Unix time."""
        text = self.word(column)
        try:
            return unix_time_s(text)
        except (ValueError, OverflowError) as error:
            raise self.error(column, f"is no time like 2024-05-10 00:00:00: {text[:_SHOWN]!r}") from error

    def error(self, column: str, complaint: str) -> DemandFileError:
        return DemandFileError(f"{self._path}: line {self.number_in_file}: column {column} {complaint}")


def unix_time_s(text: str) -> float:
    """A date and time like 2024-05-10 00:00:00, in UTC if it has no zone, as Unix time.

    Raises:
        ValueError: it is invalid, or before 1970.
    """
    time = datetime.fromisoformat(text)
    time_s = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    if time_s < 0:
        raise ValueError(f"{text} is before 1970")
    return time_s


class CsvFile:
    """An open CSV: its header, and its lines, which can be read once."""

    def __init__(self, path: Path, text: IO[str], report: Callable[[], None]) -> None:
        self.path = path
        self._reader = csv.reader(text, strict=True)
        self._report = report
        self.header = [name.strip() for name in self._next() or []]

    def lines(self, columns: tuple[str, ...]) -> Iterator[Line]:
        """The lines after the header without empty ones. The header must have `columns`, and may have others.

        Raises:
            DemandFileError: a column is missing or repeated, or a line has too few or too many fields.
        """
        indices = self._indices(columns)
        while (fields := self._next()) is not None:
            number = self._reader.line_num
            if number % _REPORT_LINES == 0:
                self._report()
            if len(fields) == len(self.header):
                yield Line(self.path, number, fields, indices)
            elif fields:
                complaint = f"{len(fields)} columns, the header has {len(self.header)}"
                raise DemandFileError(f"{self.path}: line {number}: {complaint}")

    def _next(self) -> list[str] | None:
        try:
            return next(self._reader, None)
        except csv.Error as error:
            raise DemandFileError(f"{self.path}: line {self._reader.line_num}: {error}") from error

    def _indices(self, columns: tuple[str, ...]) -> dict[str, int]:
        for column in columns:
            if self.header.count(column) != 1:
                complaint = "is repeated" if column in self.header else "is missing"
                found = ", ".join(self.header)[:200] or "nothing"
                raise DemandFileError(f"{self.path}: line 1: column {column} {complaint}; found: {found}")
        return {column: self.header.index(column) for column in columns}


@contextmanager
def open_csv(path: Path, progress: Progress = no_progress) -> Iterator[CsvFile]:
    """A CSV in UTF-8, compressed by gzip or not. Raises DemandFileError, in the block too, if it cannot be read."""
    with _opened(path, progress) as (text, report):
        yield CsvFile(path, text, report)


def json_lines(
    path: Path, columns: tuple[str, ...], progress: Progress = no_progress, optional: tuple[str, ...] = ()
) -> Iterator[Line]:
    """The objects of a JSON lines file as lines with those columns. `optional` ones are empty where they are missing.
    See `open_csv`.

    Raises:
        DemandFileError: the file cannot be read, a line is no JSON object, or lacks one of the columns.
    """
    indices = {column: index for index, column in enumerate((*columns, *optional))}
    with _opened(path, progress) as (text, report):
        for number, line in enumerate(text, start=1):
            if line.isspace():
                continue
            found = _json_object(path, number, line)
            for column in columns:
                if column not in found:
                    raise DemandFileError(f"{path}: line {number}: field {column} is missing")
            if number % _REPORT_LINES == 0:
                report()
            yield Line(path, number, [_plain(found.get(column, "")) for column in indices], indices)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DemandFileError(f"{path}: line {number}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise DemandFileError(f"{path}: line {number}: no JSON object but {line.strip()[:_SHOWN]!r}")
    return found


@contextmanager
def _opened(path: Path, progress: Progress) -> Iterator[tuple[IO[str], Callable[[], None]]]:
    """The text of a file, and a function that reports the progress."""
    try:
        with path.open("rb") as raw:
            compressed = raw.peek(2)[:2] == _GZIP_MAGIC
            source = gzip.GzipFile(fileobj=raw) if compressed else raw
            seekable = raw.seekable()
            yield (
                io.TextIOWrapper(source, encoding="utf-8-sig", newline=""),
                lambda: progress(raw.tell() if seekable else 0),
            )
    except UnicodeDecodeError as error:
        raise DemandFileError(f"{path}: {_undecodable(path)}not UTF-8: {error.reason}") from error
    except (OSError, EOFError) as error:
        raise DemandFileError(f"{path}: cannot be read: {error}") from error


def _undecodable(path: Path) -> str:
    """The first line that is not UTF-8, for an error; empty for a pipe, which cannot be read again."""
    if not path.is_file():
        return ""
    with path.open("rb") as raw:
        lines = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP_MAGIC else raw
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"line {number}: "
    return ""
