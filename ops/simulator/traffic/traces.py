"""Requests from recordings that list each of them: a stream, read line by line.

Where more than one request is wanted for each that is recorded, the first comes when it was recorded and the others at
random until the next: the recording keeps its shape, down to its bursts.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forecasts.importers.lines import DemandFileError, Line, open_csv
from forecasts.importers.listings import AZURE, BURSTGPT, MOONCAKE, Listing
from ops.simulator.kernel.requests import Request
from ops.simulator.traffic.senders import Names, Sender
from ops.simulator.traffic.traffic_parts import RecordedPart

LISTINGS = {"azure-2023": AZURE, "burstgpt": BURSTGPT, "mooncake": MOONCAKE}
"""By the kind of traffic."""

AEGAEON = ("workload", "request_time", "model_name", "input_len", "output_len")
_CHUNK = 1024
_BLOCKS_MAX = 2**40
"""Block hashes are below it. A request that is wanted more than once has blocks of its own in each copy."""


class Recorded(NamedTuple):
    """A request of a recording. `time_s`: after its time 0. `model`: None = it names none. `blocks`: see `Request`."""

    time_s: float
    model: str | None
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()

    def scaled(self, inputs: float, outputs: float) -> "Recorded":
        """With a prompt and an answer so many times as long, of at least a token each."""
        return self._replace(
            prompt_tokens=max(1, round(inputs * self.prompt_tokens)),
            output_tokens=max(1, round(outputs * self.output_tokens)),
        )


def read_aegaeon(path: Path, workload: str) -> Iterator[Recorded]:
    """One workload of Aegaeon's artifact, by its name such as synth-40-0.1-1.0-1.0.

    Raises:
        DemandFileError: the file cannot be read, goes back in time, or has no such workload.
    """
    last_s: float | None = None
    with open_csv(path) as file:
        for line in file.lines(AEGAEON):
            if line.word("workload") == workload:
                last_s = _not_before(last_s, _clock_time_s(line, "request_time"), line, "request_time")
                yield Recorded(
                    time_s=last_s,
                    model=line.word("model_name"),
                    prompt_tokens=_tokens(line, "input_len"),
                    output_tokens=_tokens(line, "output_len"),
                )
        if last_s is None:
            raise DemandFileError(f"{path}: has no workload {workload}")


def read_listing(path: Path, listing: Listing) -> Iterator[Recorded]:
    """A recording with a line for each request. Time 0 is the first one's, where the file has dates.

    Raises:
        DemandFileError: the file cannot be read, or goes back in time.
    """
    with listing.open(path) as lines:
        yield from listed(lines, listing)


def listed(lines: Callable[[tuple[str, ...]], Iterable[Line]], listing: Listing) -> Iterator[Recorded]:
    """As `read_listing`, of a file that is open."""
    zero_s: float | None = None if listing.unit_s is None else 0.0
    time_s: float | None = None
    for line in lines(listing.columns):
        time_s = _not_before(time_s, listing.time_s(line), line, listing.time)
        zero_s = time_s if zero_s is None else zero_s
        yield Recorded(
            time_s=time_s - zero_s,
            model=line.word(listing.model) if listing.model else None,
            prompt_tokens=_tokens(line, listing.input_tokens),
            output_tokens=_tokens(line, listing.output_tokens),
            blocks=() if listing.blocks is None else line.integers(listing.blocks),
        )


def replay(
    records: Iterable[Recorded], sender: Sender, names: Names, part: RecordedPart, seed: int
) -> Iterator[Request]:
    """The requests of a recording. What it does not say is drawn from `sender`; `names`: for the models it names."""
    rng = np.random.default_rng(seed)
    wanted = _repeated(_within(records, part), part, rng)
    number = 0
    while chunk := list(islice(wanted, _CHUNK)):
        drawn = sender.draw(rng, len(chunk))
        for record, model, origin, tier in zip(chunk, *(names.tolist() for names in drawn), strict=True):
            yield Request(
                number=number,
                arrived_s=record.time_s - part.from_s,
                model=model if record.model is None else names(record.model),
                origin=origin,
                tier=tier,
                prompt_tokens=record.prompt_tokens,
                output_tokens=record.output_tokens,
                blocks=record.blocks,
            )
            number += 1


def _within(records: Iterable[Recorded], part: RecordedPart) -> Iterator[Recorded]:
    for record in records:
        if record.time_s >= part.ends_s:
            return
        if record.time_s >= part.from_s:
            yield record


def _repeated(records: Iterable[Recorded], part: RecordedPart, rng: np.random.Generator) -> Iterator[Recorded]:
    for record, following in pairwise(chain(records, (None,))):
        assert record is not None
        end_s = record.time_s if following is None else following.time_s
        count = int(part.scale + rng.random())
        times_s = [record.time_s, *rng.uniform(record.time_s, end_s, max(0, count - 1)).tolist()][:count]
        for copy, time_s in enumerate(sorted(times_s)):
            blocks = tuple(block + copy * _BLOCKS_MAX for block in record.blocks) if copy else record.blocks
            yield record._replace(time_s=time_s, blocks=blocks)


def _not_before(last_s: float | None, time_s: float, line: Line, column: str) -> float:
    if last_s is not None and time_s < last_s:
        raise line.error(column, "lies before the line above; a trace is read in order")
    return time_s


def _tokens(line: Line, column: str) -> int:
    """A number of tokens, at least 1."""
    return max(1, round(line.amount(column)))


def _clock_time_s(line: Line, column: str) -> float:
    """Seconds since midnight of a time like 00:01:02.345."""
    text = line.word(column)
    try:
        time = datetime.strptime(text, "%H:%M:%S.%f")  # noqa: DTZ007 - a time of no day
    except ValueError as error:
        raise line.error(column, f"is no time like 00:01:02.345: {text[:40]!r}") from error
    return time.hour * 3600 + time.minute * 60 + time.second + time.microsecond / 1e6
