"""Formats with a line per request: the columns of its time, model and lengths."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forecasts.importers.lines import Line, Progress, json_lines, no_progress, open_csv


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Columns of a format. `model`: None = its files have none. `unit_s`: unit of its times, which count from the start
    of the recording; None = they are dates. `blocks`: a list of hashes of the prompt's blocks, each standing for all
    before it too; lines need not have it.
    """

    time: str
    input_tokens: str
    output_tokens: str
    model: str | None = None
    unit_s: float | None = None
    json: bool = False
    blocks: str | None = None

    @property
    def demand_columns(self) -> tuple[str, ...]:
        """The columns that demand is computed from."""
        return (self.time, self.input_tokens) if self.model is None else (self.time, self.input_tokens, self.model)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.demand_columns, self.output_tokens)

    def time_s(self, line: Line, start_s: float = 0.0) -> float:
        """Arrival of a request as Unix time. `start_s`: that of the start of the recording, if times count from it."""
        if self.unit_s is None:
            return line.date_time_s(self.time)
        return line.time_after_s(start_s, self.time, self.unit_s)

    @contextmanager
    def open(
        self, path: Path, progress: Progress = no_progress
    ) -> Iterator[Callable[[tuple[str, ...]], Iterator[Line]]]:
        """Open a file. Yields a function that returns the lines with given columns.

        Raises:
            forecasts.importers.lines.DemandFileError: it cannot be read, in the block too.
        """
        if self.json:
            optional = () if self.blocks is None else (self.blocks,)
            yield partial(json_lines, path, progress=progress, optional=optional)
        else:
            with open_csv(path, progress) as file:
                yield file.lines


AZURE = Listing(time="TIMESTAMP", input_tokens="ContextTokens", output_tokens="GeneratedTokens")
"""Azure's LLM inference traces of 2023 and 2024."""
BURSTGPT = Listing(
    time="Timestamp", input_tokens="Request tokens", output_tokens="Response tokens", model="Model", unit_s=1.0
)
"""Seconds after the first midnight."""
MOONCAKE = Listing(
    time="timestamp",
    input_tokens="input_length",
    output_tokens="output_length",
    unit_s=0.001,
    json=True,
    blocks="hash_ids",
)
"""JSON objects; milliseconds after the start."""
