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
from forecasts.importers.settings import MINUTE_S, ImportSettings, Reader
from forecasts.series import DemandRow

SPAN_S_MAX = 3 * 366 * 86_400.0
"""Most time between the first and last request: one wrong time must not become millions of empty minutes."""

CODING = "coding"


def azure_requests(file: CsvFile, settings: ImportSettings) -> Iterator[DemandRow]:
    """`read_azure_requests` for an open file."""
    return _summed(file.lines(AZURE.demand_columns), AZURE, settings, CODING)


def _reader(listing: Listing, model: str) -> Reader:
    """A reader of files of one listing. It raises DemandFileError if the file spans more than `SPAN_S_MAX`."""

    def read(path: Path, settings: ImportSettings, progress: Progress = no_progress) -> Iterator[DemandRow]:
        with listing.open(path, progress) as lines:
            yield from _summed(lines(listing.demand_columns), listing, settings, model)

    return read


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


read_azure_requests = _reader(AZURE, CODING)
"""Azure's LLM inference traces of 2023 and 2024, a line per request: TIMESTAMP (UTC), ContextTokens, ..."""
read_burstgpt = _reader(BURSTGPT, "")
"""BurstGPT: a line per request with Timestamp (seconds after the first midnight), Model, Request tokens, ... Failed
requests, which have no response tokens, count: their prompts were received too.
"""
read_mooncake = _reader(MOONCAKE, "mooncake")
"""Mooncake: a JSON object per request with timestamp (milliseconds after the start), input_length, ..."""
