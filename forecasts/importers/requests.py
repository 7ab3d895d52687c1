"""Traces with a line per request: their input tokens are summed by minute.

Such a trace is complete, so that a minute without a request is zero and no gap, from a model's first request to the end
of the trace. The first and the last minute may be covered partially.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from forecasts.importers.lines import CsvFile, Line, Progress, no_progress
from forecasts.importers.listings import AZURE, BURSTGPT, MOONCAKE, Listing
from forecasts.importers.settings import MINUTE_S, ImportSettings
from forecasts.series import DemandRow

SPAN_S_MAX = 3 * 366 * 86_400.0
"""Most time between the first and last request: one wrong time must not become millions of empty minutes."""

CODING = "coding"
_DEFAULTS = ImportSettings()


def read_azure_requests(
    path: Path, settings: ImportSettings = _DEFAULTS, progress: Progress = no_progress
) -> Iterator[DemandRow]:
    """Azure's LLM inference traces of 2023 and 2024, a line for each request: TIMESTAMP (UTC), ContextTokens, ...

    Raises:
        DemandFileError: the file cannot be read, or spans more than `SPAN_S_MAX`.
    """
    yield from _read(path, AZURE, settings, CODING, progress)


def azure_requests(file: CsvFile, settings: ImportSettings) -> Iterator[DemandRow]:
    """`read_azure_requests` for an open file."""
    return _summed(file.lines(AZURE.demand_columns), AZURE, settings, CODING)


def read_burstgpt(
    path: Path, settings: ImportSettings = _DEFAULTS, progress: Progress = no_progress
) -> Iterator[DemandRow]:
    """BurstGPT: a line for each request with Timestamp (seconds after the first midnight), Model, Request tokens, ...

    Failed requests, which have no response tokens, count: their prompts were received too.

    Raises:
        DemandFileError: as `read_azure_requests`.
    """
    yield from _read(path, BURSTGPT, settings, "", progress)


def read_mooncake(
    path: Path, settings: ImportSettings = _DEFAULTS, progress: Progress = no_progress
) -> Iterator[DemandRow]:
    """Mooncake: a JSON object for each request with timestamp (milliseconds after the start), input_length, ...

    Raises:
        DemandFileError: as `read_azure_requests`.
    """
    yield from _read(path, MOONCAKE, settings, "mooncake", progress)


def _read(
    path: Path, listing: Listing, settings: ImportSettings, model: str, progress: Progress
) -> Iterator[DemandRow]:
    with listing.open(path, progress) as lines:
        yield from _summed(lines(listing.demand_columns), listing, settings, model)


def _summed(lines: Iterable[Line], listing: Listing, settings: ImportSettings, model: str) -> Iterator[DemandRow]:
    """`model`: the name if neither the file nor the settings have one."""
    minutes = _Minutes()
    for line in lines:
        name = line.word(listing.model) if listing.model else settings.model or model
        time_s = listing.time_s(line, settings.start_s)
        minutes.add(name, time_s, line, listing.time, listing.input_tokens)
    yield from minutes.rows(settings.region)


class _Minutes:
    """Input tokens by model and minute."""

    def __init__(self) -> None:
        self._tokens: dict[str, defaultdict[int, float]] = {}
        self._first = self._last = -1

    def add(self, model: str, time_s: float, line: Line, time_column: str, tokens_column: str) -> None:
        minute = math.floor(time_s / MINUTE_S)
        first = minute if self._first < 0 else min(self._first, minute)
        last = max(self._last, minute)
        if (last - first) * MINUTE_S > SPAN_S_MAX:
            days = SPAN_S_MAX / 86_400
            raise line.error(time_column, f"{line.text(time_column)} is over {days:.0f} days from other requests")
        self._first, self._last = first, last
        self._tokens.setdefault(model, defaultdict(float))[minute] += line.amount(tokens_column)

    def rows(self, region: str) -> Iterator[DemandRow]:
        for model, tokens in sorted(self._tokens.items()):
            for minute in range(min(tokens), self._last + 1):
                yield DemandRow(
                    start_s=minute * MINUTE_S,
                    region=region,
                    model=model,
                    tokens_per_s=tokens.get(minute, 0.0) / MINUTE_S,
                )
