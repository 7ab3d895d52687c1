"""Lines of a demand file and the values in them; what cannot be read is named by file, line and column."""

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
_TELL_LINES = 2_000
_SHOWN = 50

Told = Callable[[int], None]
"""Called now and then with how many bytes of the file, packed as it is, are read."""


class DemandFileError(ValueError):
    """A demand file that cannot be read; the message names file, line and column."""


def not_told(_: int) -> None:
    """Nobody is told."""


class Line:
    """One line of a file; its readers say where a bad value stands."""

    __slots__ = ("_fields", "_path", "_places", "number_in_file")

    def __init__(self, path: Path, number: int, fields: list[str], places: Mapping[str, int]) -> None:
        self._path = path
        self.number_in_file = number
        self._fields = fields
        self._places = places

    def text(self, column: str) -> str:
        """The value as it stands, without blanks around it."""
        return self._fields[self._places[column]].strip()

    def word(self, column: str) -> str:
        """A name.

        Raises:
            DemandFileError: it is empty, or holds what cannot be printed.
        """
        word = self.text(column)
        if not word:
            raise self.error(column, "is empty")
        if not word.isprintable():
            raise self.error(column, f"holds a character that cannot be printed: {word[:_SHOWN]!r}")
        return word

    def number(self, column: str) -> float:
        """A finite number."""
        text = self._fields[self._places[column]]
        try:
            number = float(text)
        except ValueError:
            raise self.error(column, f"is no number: {self.word(column)[:_SHOWN]!r}") from None
        if not math.isfinite(number):
            raise self.error(column, f"must be finite, is {number}")
        return number

    def amount(self, column: str) -> float:
        """A finite number that is not negative."""
        amount = self.number(column)
        if amount < 0:
            raise self.error(column, f"must be finite and not negative, is {amount}")
        return amount

    def amount_or_gap(self, column: str) -> float | None:
        """As `amount`; None where the field is empty."""
        return self.amount(column) if self.text(column) else None

    def unix_time_s(self, column: str) -> float:
        """A Unix time from 0 to the year 9999."""
        time_s = self.number(column)
        if not 0 <= time_s <= TIME_S_MAX:
            raise self.error(column, f"must be a Unix time from 0 to {TIME_S_MAX:.0f}, is {self.text(column)[:_SHOWN]}")
        return time_s

    def time_after_s(self, start_s: float, column: str, unit_s: float) -> float:
        """The Unix time that lies so many units after a start, up to the year 9999."""
        time_s = start_s + self.amount(column) * unit_s
        if time_s > TIME_S_MAX:
            raise self.error(column, f"lies after the year 9999: {self.text(column)[:_SHOWN]}")
        return time_s

    def date_time_s(self, column: str) -> float:
        """A date and time, in UTC where it names no zone, as Unix time."""
        text = self.word(column)
        try:
            return unix_time_s(text)
        except (ValueError, OverflowError) as error:
            raise self.error(column, f"is no time like 2024-05-10 00:00:00: {text[:_SHOWN]!r}") from error

    def error(self, column: str, complaint: str) -> DemandFileError:
        """What to raise about a value."""
        return DemandFileError(f"{self._path}: line {self.number_in_file}: column {column} {complaint}")


def unix_time_s(text: str) -> float:
    """A date and time like 2024-05-10 00:00:00, in UTC where it names no zone, as Unix time.

    Raises:
        ValueError: it is none, or before 1970.
    """
    time = datetime.fromisoformat(text)
    time_s = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    if time_s < 0:
        raise ValueError(f"{text} is before 1970")
    return time_s


class CsvFile:
    """A CSV that is open: its header, and its lines once."""

    def __init__(self, path: Path, text: IO[str], tell: Callable[[], None]) -> None:
        self.path = path
        self._reader = csv.reader(text, strict=True)
        self._tell = tell
        self.header = [name.strip() for name in self._next() or []]

    def lines(self, columns: tuple[str, ...]) -> Iterator[Line]:
        """The lines after the header; empty ones are passed over.

        Args:
            columns: what the header must name, in any order; more is allowed.

        Raises:
            DemandFileError: a column is missing or there twice, or a line has too few or too many fields.
        """
        places = self._places(columns)
        while (fields := self._next()) is not None:
            number = self._reader.line_num
            if number % _TELL_LINES == 0:
                self._tell()
            if len(fields) == len(self.header):
                yield Line(self.path, number, fields, places)
            elif fields:
                complaint = f"{len(fields)} columns, the header has {len(self.header)}"
                raise DemandFileError(f"{self.path}: line {number}: {complaint}")

    def _next(self) -> list[str] | None:
        try:
            return next(self._reader, None)
        except csv.Error as error:
            raise DemandFileError(f"{self.path}: line {self._reader.line_num}: {error}") from error

    def _places(self, columns: tuple[str, ...]) -> dict[str, int]:
        for column in columns:
            if self.header.count(column) != 1:
                complaint = "is there twice" if column in self.header else "is missing"
                found = ", ".join(self.header)[:200] or "nothing"
                raise DemandFileError(f"{self.path}: line 1: column {column} {complaint}; found: {found}")
        return {column: self.header.index(column) for column in columns}


@contextmanager
def open_csv(path: Path, told: Told = not_told) -> Iterator[CsvFile]:
    """A CSV in UTF-8, packed by gzip or not.

    Args:
        path: the file.
        told: is told how far the reading is.

    Raises:
        DemandFileError: the file cannot be read, now or later.
    """
    with _opened(path, told) as (text, tell):
        yield CsvFile(path, text, tell)


def json_lines(path: Path, columns: tuple[str, ...], told: Told = not_told) -> Iterator[Line]:
    """The objects of a JSON lines file as lines with those columns. See `open_csv`.

    Raises:
        DemandFileError: the file cannot be read, a line is no JSON object, or lacks one of the columns.
    """
    places = {column: place for place, column in enumerate(columns)}
    with _opened(path, told) as (text, tell):
        for number, line in enumerate(text, start=1):
            if line.isspace():
                continue
            found = _json_object(path, number, line)
            for column in columns:
                if column not in found:
                    raise DemandFileError(f"{path}: line {number}: field {column} is missing")
            if number % _TELL_LINES == 0:
                tell()
            yield Line(path, number, [_plain(found[column]) for column in columns], places)


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
def _opened(path: Path, told: Told) -> Iterator[tuple[IO[str], Callable[[], None]]]:
    """The text of a file, and what to call to tell how much of it is read."""
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == _GZIP_MAGIC
            source = gzip.GzipFile(fileobj=raw) if packed else raw
            seekable = raw.seekable()
            yield (
                io.TextIOWrapper(source, encoding="utf-8-sig", newline=""),
                lambda: told(raw.tell() if seekable else 0),
            )
    except UnicodeDecodeError as error:
        raise DemandFileError(f"{path}: {_undecodable(path)}not UTF-8: {error.reason}") from error
    except (OSError, EOFError) as error:
        raise DemandFileError(f"{path}: cannot be read: {error}") from error


def _undecodable(path: Path) -> str:
    """Where the first line is that is no UTF-8; nothing for what cannot be read twice."""
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
