"""ServeGen's recordings: what whole models or one model's clients sent in each 10 minutes, and how long it was."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forecasts.importers.lines import CsvFile, Line, json_lines
from forecasts.importers.rates import SERVEGEN, SERVEGEN_CLIENTS
from ops.simulator.traffic.rates import Bucket, Flow, Intervals, Open, flow_of
from ops.simulator.traffic.senders import Sender, alike
from ops.simulator.traffic.traffic_parts import IntArray

FloatArray = npt.NDArray[np.float64]

BUCKET_S = 600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthHistogram:
    """Token counts and their shares. Both have the shape (counts,)."""

    tokens: IntArray
    shares: FloatArray

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        return rng.choice(self.tokens, count, p=self.shares)


ClientLengths = dict[float, tuple[LengthHistogram, LengthHistogram]]
"""Prompts and answers by when their six hours begin."""


def servegen_buckets(file: CsvFile, given: Open) -> Iterator[Bucket]:
    """ServeGen per 10 minutes: one model's clients, with the requests that they sent; or whole models, as Poisson.

    Clients are dealt out to the regions by turns. A time at which every client is at zero is a gap in the data; nothing
    comes in it.
    """
    flows: defaultdict[float, list[Flow]] = defaultdict(list)
    if "client_chunk" in file.header:
        _servegen_clients(file, given, flows)
    else:
        for line in file.lines(SERVEGEN):
            sender = replace(given.sender, models=alike([given.names(line.word("model"))]))
            requests = line.amount("rps_all_clients") * BUCKET_S
            flows[line.amount("t_s")].append(flow_of(given, sender, requests))
    for start_s in sorted(flows):
        yield start_s, BUCKET_S, flows.pop(start_s)


def _servegen_clients(file: CsvFile, given: Open, flows: defaultdict[float, list[Flow]]) -> None:
    part, regions = given.part, list(given.sender.origins)
    known = {} if part.lengths is None else read_servegen_lengths(part.lengths)
    senders: dict[str, Sender] = {}
    for line in file.lines((*SERVEGEN_CLIENTS, "arrival_pattern", "param1")):
        client, requests = line.word("client_chunk"), line.amount("rate_rps") * BUCKET_S
        if client not in senders:
            origin = regions[len(senders) % len(regions)]
            senders[client] = replace(given.sender, origins=alike([origin]))
        if not requests:
            continue
        pattern = line.text("arrival_pattern")
        if pattern not in {"Gamma", "Weibull"}:
            raise line.error("arrival_pattern", f"must be Gamma or Weibull, is {pattern[:20]!r}")
        if not line.amount("param1") > 0:
            raise line.error("param1", "must be above 0: it is the shape of the intervals")
        start_s = line.amount("timestamp_s")
        prompt, output = _lengths_at(known.get(client, {}), start_s) or (part.prompt_tokens, part.output_tokens)
        flow = Flow(
            sender=senders[client],
            requests=requests,
            prompt=prompt,
            output=output,
            counted=True,
            intervals=Intervals(pattern, line.amount("param1")),  # type: ignore[arg-type]
        )
        flows[start_s].append(flow)


def read_servegen_lengths(path: Path) -> dict[str, ClientLengths]:
    """ServeGen's histograms by client; six hours without one are left out.

    Raises:
        forecasts.importers.lines.DemandFileError: the file cannot be read, or holds something else.
    """
    return {line.word("client_chunk"): _client_lengths(line) for line in json_lines(path, ("client_chunk", "windows"))}


def _client_lengths(line: Line) -> ClientLengths:
    try:
        windows = json.loads(line.text("windows"))
        return {
            float(start_s): (_lengths(window["input_tokens"]), _lengths(window["output_tokens"]))
            for start_s, window in windows.items()
            if "{}" not in window.values()
        }
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise line.error("windows", "must have histograms of input_tokens and output_tokens by time") from error


def _lengths(text: str) -> LengthHistogram:
    """Parse a histogram like {163: 0.25, 164: 0.75}. Counts below 1 become 1."""
    pairs = np.array(text.strip("{}").replace(":", ",").split(","), dtype=float).reshape(-1, 2)
    if not pairs[:, 1].sum() > 0 or pairs.min() < 0:
        raise ValueError("no shares")
    return LengthHistogram(tokens=np.maximum(pairs[:, 0], 1).astype(np.int64), shares=pairs[:, 1] / pairs[:, 1].sum())


def _lengths_at(known: ClientLengths, at_s: float) -> tuple[LengthHistogram, LengthHistogram] | None:
    """The last histograms until a moment, or the first after it; None if the client has none."""
    if not known:
        return None
    return known[max((start_s for start_s in known if start_s <= at_s), default=min(known))]
