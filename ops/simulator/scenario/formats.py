"""The requests of a scenario, whatever its traffic is: made up, listed one by one, or drawn from recorded rates."""

import math
from collections.abc import Callable, Iterator, Mapping

from forecasts.importers.lines import CsvFile, open_csv
from forecasts.importers.listings import AZURE
from ops.simulator.kernel.requests import Request
from ops.simulator.scenario.scenario import Scenario
from ops.simulator.traffic.rates import Bucket, Open, azure_buckets, checked, csv_buckets, draw, sageserve_buckets
from ops.simulator.traffic.senders import Names, Sender, alike
from ops.simulator.traffic.servegen import servegen_buckets
from ops.simulator.traffic.traces import LISTINGS, Window, listed, read_aegaeon, read_listing, replay
from ops.simulator.traffic.traffic import Burst, Generated, generate, zipf
from ops.simulator.traffic.traffic_parts import AegaeonPart, GeneratedPart, ListedPart, RatesPart, RecordedPart

BUCKETS: Mapping[str, Callable[[CsvFile, Open], Iterator[Bucket]]] = {
    "azure-2024": azure_buckets,
    "csv": csv_buckets,
    "sageserve": sageserve_buckets,
    "servegen": servegen_buckets,
}
"""Readers of rates by the kind of traffic."""


def traffic_of(scenario: Scenario, seed: int) -> Iterator[Request]:
    """The requests, in order of arrival, the same for the same seed; read and drawn as they are asked for.

    Raises:
        forecasts.importers.lines.DemandFileError: the recording cannot be read, now or later.
    """
    traffic = scenario.traffic
    models = [model.name for model in scenario.models]
    if isinstance(traffic, GeneratedPart):
        return generate(_generated(traffic, models), seed)
    sender = Sender(
        models=traffic.models or alike(models), origins=traffic.origins or alike(scenario.regions), tiers=traffic.tiers
    )
    window = _window(traffic)
    if isinstance(traffic, AegaeonPart):
        return replay(read_aegaeon(traffic.path, traffic.workload), sender, Names(models, keep=True), window, seed)
    if isinstance(traffic, ListedPart):
        return replay(read_listing(traffic.path, LISTINGS[traffic.kind]), sender, Names(models), window, seed)
    return _of_rates(traffic, sender, Names(models), window, seed)


def _of_rates(traffic: RatesPart, sender: Sender, names: Names, window: Window, seed: int) -> Iterator[Request]:
    given = Open(
        sender=sender,
        names=names,
        regions=list(sender.origins),
        prompt=traffic.prompt_tokens.lengths,
        output=traffic.output_tokens.lengths,
        lengths=traffic.lengths,
    )
    with open_csv(traffic.path) as file:
        if traffic.kind == "azure-2024" and "Time" not in file.header:
            yield from replay(listed(file.lines, AZURE), sender, names, window, seed)
        else:
            buckets = BUCKETS[traffic.kind](file, given)
            yield from draw(checked(buckets, traffic.path, window.scale), window, seed)


def _window(traffic: RecordedPart) -> Window:
    until_s = math.inf if traffic.until_s is None else traffic.until_s
    return Window(scale=traffic.scale, from_s=traffic.from_s, until_s=until_s)


def _generated(traffic: GeneratedPart, models: list[str]) -> Generated:
    return Generated(
        rate_per_s=traffic.rate_per_s,
        duration_s=traffic.duration_s,
        models=zipf(models, traffic.zipf),
        origins=traffic.origins,
        tiers=traffic.tiers,
        prompt=traffic.prompt_tokens.lengths,
        output=traffic.output_tokens.lengths,
        cv=traffic.cv,
        day_swing=traffic.day_swing,
        peak_hour=traffic.peak_hour,
        bursts=tuple(Burst(**burst.model_dump()) for burst in traffic.bursts),
    )
