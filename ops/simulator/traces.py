"""Requests from recordings that list each of them: a stream, read line by line. Times start at 0."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from dataplane.messages import Tier
from forecasts.importers.lines import DemandFileError, Line, open_csv
from ops.simulator.requests import Request

_AEGAEON = ("workload", "request_time", "model_name", "input_len", "output_len")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_aegaeon(path: Path, workload: str, *, origin: str, tier: Tier) -> Iterator[Request]:
    """One workload of Aegaeon's artifact, by its name such as synth-40-0.1-1.0-1.0.

    Raises:
        forecasts.importers.lines.DemandFileError: the file cannot be read, or has no such workload.
    """
    number = 0
    with open_csv(path) as file:
        for line in file.lines(_AEGAEON):
            if line.word("workload") != workload:
                continue
            yield Request(
                number=number,
                arrived_s=_clock_time_s(line, "request_time"),
                model=line.word("model_name"),
                origin=origin,
                tier=tier,
                prompt_tokens=_tokens(line, "input_len"),
                output_tokens=_tokens(line, "output_len"),
            )
            number += 1
        if not number:
            raise DemandFileError(f"{path}: has no workload {workload}")


def read_azure(path: Path, *, model: str, origin: str, tier: Tier) -> Iterator[Request]:
    """Azure's LLM inference traces of 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens.

    Raises:
        forecasts.importers.lines.DemandFileError: the file cannot be read, or goes back in time.
    """
    began_s: float | None = None
    last_s = 0.0
    with open_csv(path) as file:
        for number, line in enumerate(file.lines(_AZURE)):
            time_s = line.date_time_s("TIMESTAMP")
            began_s = time_s if began_s is None else began_s
            if time_s < last_s:
                raise line.error("TIMESTAMP", "lies before the line above; a trace is read in order")
            last_s = time_s
            yield Request(
                number=number,
                arrived_s=time_s - began_s,
                model=model,
                origin=origin,
                tier=tier,
                prompt_tokens=_tokens(line, "ContextTokens"),
                output_tokens=_tokens(line, "GeneratedTokens"),
            )


def _tokens(line: Line, column: str) -> int:
    """A number of tokens; a request has at least one of each kind."""
    return max(1, round(line.amount(column)))


def _clock_time_s(line: Line, column: str) -> float:
    """Seconds since midnight of a time like 00:01:02.345."""
    text = line.word(column)
    try:
        time = datetime.strptime(text, "%H:%M:%S.%f")  # noqa: DTZ007 - a time of no day
    except ValueError as error:
        raise line.error(column, f"is no time like 00:01:02.345: {text[:40]!r}") from error
    return time.hour * 3600 + time.minute * 60 + time.second + time.microsecond / 1e6
