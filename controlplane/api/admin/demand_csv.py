"""Parsing an uploaded demand file: CSV with a header line, read line by line; an error names line and field."""

import csv
import math
from collections.abc import Collection, Iterator
from typing import TextIO

from controlplane.api.admin.fields import TIME_S_MAX
from controlplane.errors import InvalidValueError
from controlplane.policies.facts import Endpoint
from controlplane.store.demand import DemandRow

COLUMNS = ("start_s", "region", "model", "tokens_per_s")
BUCKET_S = 60


def read_rows(lines: TextIO, *, kind: str, models: Collection[str], regions: Collection[str]) -> Iterator[DemandRow]:
    """The demand of a CSV with the columns start_s, region, model, tokens_per_s in any order. An empty tokens_per_s is
    a gap: it makes no row.

    Raises:
        InvalidValueError: a column is missing, a name is not registered, or a number is none, negative, infinite, or a
            start_s that is not a whole minute; it names the line and the field.
    """
    reader = csv.reader(lines, strict=True)
    try:
        header = next(reader, [])
        positions = _positions(header)
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise _error(reader.line_num, None, f"{len(fields)} columns, the header has {len(header)}")
            start_s, region, model, tokens = (fields[position].strip() for position in positions)
            if region not in regions:
                raise _error(reader.line_num, "region", f"'{region}' is not registered")
            if model not in models:
                raise _error(reader.line_num, "model", f"'{model}' is not registered")
            minute_s = _minute(start_s, reader.line_num)
            if tokens:
                endpoint = Endpoint(model=model, region=region)
                value = _tokens(tokens, reader.line_num)
                yield DemandRow(endpoint=endpoint, kind=kind, start_s=minute_s, tokens_per_s=value)
    except csv.Error as error:
        raise _error(reader.line_num, None, f"not CSV: {error}") from error


def _positions(header: list[str]) -> list[int]:
    names = [name.strip().removeprefix("\ufeff") for name in header]
    for column in COLUMNS:
        if names.count(column) != 1:
            raise _error(1, column, f"the header must name it once; it is: {','.join(names)[:200] or 'empty'}")
    return [names.index(column) for column in COLUMNS]


def _minute(text: str, line: int) -> int:
    value = _number(text, line, "start_s")
    if not 0 <= value <= TIME_S_MAX:
        raise _error(line, "start_s", f"must be a Unix time from 0 to {TIME_S_MAX}, is {text[:50]}")
    if value % BUCKET_S:
        raise _error(line, "start_s", f"must be a multiple of {BUCKET_S}, is {text[:50]}")
    return int(value)


def _tokens(text: str, line: int) -> float:
    value = _number(text, line, "tokens_per_s")
    if not 0 <= value < math.inf:
        raise _error(line, "tokens_per_s", f"must be finite and not negative, is {text[:50]}")
    return value


def _number(text: str, line: int, field: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _error(line, field, f"is no number: '{text[:50]}'") from None


def _error(line: int, field: str | None, message: str) -> InvalidValueError:
    where = f"line {line}: {field}" if field else f"line {line}"
    return InvalidValueError(f"{where}: {message}", param=field)
