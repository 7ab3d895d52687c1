"""Formats that list every request: where a line says when it came, for what, and how long it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forecasts.importers.lines import Line, Told, json_lines, not_told, open_csv


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Columns of a format. `model`: None = its files name none. `unit_s`: of its times, which count from the
    recording's start; None = they are dates.
    """

    time: str
    input_tokens: str
    output_tokens: str
    model: str | None = None
    unit_s: float | None = None
    json: bool = False

    @property
    def demand_columns(self) -> tuple[str, ...]:
        """Those that demand is made of."""
        return (self.time, self.input_tokens) if self.model is None else (self.time, self.input_tokens, self.model)

    @property
    def columns(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.demand_columns, self.output_tokens)

    def time_s(self, line: Line, start_s: float = 0.0) -> float:
        """When a request came, as Unix time. `start_s`: that of the recording's start, where times count from it."""
        if self.unit_s is None:
            return line.date_time_s(self.time)
        return line.time_after_s(start_s, self.time, self.unit_s)

    @contextmanager
    def open(self, path: Path, told: Told = not_told) -> Iterator[Callable[[tuple[str, ...]], Iterator[Line]]]:
        """A file, to ask for the lines with some columns.

        Raises:
            forecasts.importers.lines.DemandFileError: it cannot be read, now or later.
        """
        if self.json:
            yield partial(json_lines, path, told=told)
        else:
            with open_csv(path, told) as file:
                yield file.lines


AZURE = Listing(time="TIMESTAMP", input_tokens="ContextTokens", output_tokens="GeneratedTokens")
"""Azure's LLM inference traces of 2023 and 2024."""
BURSTGPT = Listing(
    time="Timestamp", input_tokens="Request tokens", output_tokens="Response tokens", model="Model", unit_s=1.0
)
"""Seconds after the first midnight."""
MOONCAKE = Listing(
    time="timestamp", input_tokens="input_length", output_tokens="output_length", unit_s=0.001, json=True
)
"""JSON objects; milliseconds after the start."""
