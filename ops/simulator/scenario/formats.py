"""The requests of a scenario, whatever its traffic is: made up, listed one by one, drawn from rates, or mixed."""

import heapq
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from msgspec.structs import replace

from forecasts.importers.lines import CsvFile, open_csv
from forecasts.importers.listings import AZURE
from ops.simulator.kernel.requests import Request
from ops.simulator.scenario.scenario import Scenario
from ops.simulator.traffic.rates import Bucket, Open, azure_buckets, checked, csv_buckets, draw, sageserve_buckets
from ops.simulator.traffic.senders import Names, Sender, alike
from ops.simulator.traffic.servegen import servegen_buckets
from ops.simulator.traffic.traces import LISTINGS, listed, read_aegaeon, read_listing, replay
from ops.simulator.traffic.traffic import generate
from ops.simulator.traffic.traffic_parts import AegaeonPart, GeneratedPart, ListedPart, MixedPart, OnePart, RatesPart

BUCKETS: Mapping[str, Callable[[CsvFile, Open], Iterator[Bucket]]] = {
    "azure-2024": azure_buckets,
    "csv": csv_buckets,
    "sageserve": sageserve_buckets,
    "servegen": servegen_buckets,
}
"""Readers of rates by the kind of traffic."""
_SEEDS_APART = 1_000_003
"""Between the seeds of a mixed traffic's parts, so that no two draw the same numbers."""


def traffic_of(scenario: Scenario, seed: int) -> Iterator[Request]:
    """The requests, in order of arrival, the same for the same seed; read and drawn as they are asked for.

    Raises:
        forecasts.importers.lines.DemandFileError: the recording cannot be read, now or later.
    """
    traffic = scenario.traffic
    if not isinstance(traffic, MixedPart):
        return _of_part(traffic, scenario, seed)
    streams = [_of_part(part, scenario, seed + _SEEDS_APART * place) for place, part in enumerate(traffic.parts)]
    merged = heapq.merge(*streams, key=attrgetter("arrived_s"))
    return (replace(request, number=number) for number, request in enumerate(merged))


def _of_part(traffic: OnePart | AegaeonPart, scenario: Scenario, seed: int) -> Iterator[Request]:
    """The requests of one traffic, numbered from 0."""
    models = [model.name for model in scenario.models]
    if isinstance(traffic, GeneratedPart):
        return generate(traffic, traffic.models or models, seed)
    sender = Sender(
        models=traffic.models or alike(models), origins=traffic.origins or alike(scenario.regions), tiers=traffic.tiers
    )
    if isinstance(traffic, AegaeonPart):
        recorded = read_aegaeon(traffic.path, traffic.workload)
        scaled = (one.scaled(traffic.scale_inputs, traffic.scale_outputs) for one in recorded)
        return replay(scaled, sender, Names(models, keep=True), traffic, seed)
    if isinstance(traffic, ListedPart):
        return replay(read_listing(traffic.path, LISTINGS[traffic.kind]), sender, Names(models), traffic, seed)
    return _of_rates(traffic, sender, Names(models), seed)


def _of_rates(traffic: RatesPart, sender: Sender, names: Names, seed: int) -> Iterator[Request]:
    given = Open(part=traffic, sender=sender, names=names)
    with open_csv(traffic.path) as file:
        if traffic.kind == "azure-2024" and "Time" not in file.header:
            yield from replay(listed(file.lines, AZURE), sender, names, traffic, seed)
        else:
            buckets = BUCKETS[traffic.kind](file, given)
            yield from draw(checked(buckets, traffic.path, traffic.scale), traffic, seed)
