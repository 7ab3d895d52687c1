"""How many instances of its own each endpoint has, and how many slots the reserve of its region has
(an upper quantile for every endpoint at once is more than all of them ever need together).

Two rows, as the placement has them, both at the quantile of a sum (`shortfall`):

    home     what a region's endpoints need of epsilon times their peaks beyond own instances    <= fill x its reserve
    global   what the models need of their peaks over all regions beyond own instances           <= fill x all reserves

An endpoint has an instance on each slot of its reserve, so these count for its minimum. In each region endpoints begin
with what they would have alone, and give up instances one by one, those first that the reserve can take most easily.
Of all states on the way the one with the fewest GPUs is chosen; among equals, the one whose reserve has most nearly the
slots that it has now, then the one with most own instances. So no region takes more GPUs than without a reserve. Then
slots or instances are added until the global row holds; where whole slots and instances make that more than without
reserves in any region, there is none.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controlplane.policies.facts import Endpoint, EndpointGpu, RegionGpu
from controlplane.policies.placement.error_correlation import ErrorCorrelation, PeakErrors, estimate_correlation
from controlplane.policies.placement.reserve_facts import (
    Reserve,
    ReservedEndpoint,
    ReserveEndpoint,
    ReserveFacts,
    ReservePlace,
    ReserveSettings,
    ReserveSize,
)
from controlplane.policies.placement.shortfall import ReserveLoad, ReserveSum, quantile_z, shortfall_of, slots_for

_Score = tuple[int, int, int, int]
"""GPUs that own instances, then the reserve lack; then GPUs taken; then those of slots that the reserve gains or loses,
since loading models there takes minutes.
"""


def choose_reserve(facts: ReserveFacts, now_s: float, settings: ReserveSettings) -> Reserve:
    """Size own instances and reserves together.

    Args:
        facts: what reserves can hold, and where. The order of endpoints does not matter.
        now_s: Unix time; it changes nothing.
        settings: see ReserveSettings.
    """
    levels = _Levels(sized=quantile_z(settings.quantile), upper=quantile_z(settings.upper_quantile))
    regions: dict[RegionGpu, _Region] = {}
    grouped: dict[RegionGpu, list[ReserveEndpoint]] = defaultdict(list)
    for one in sorted(facts.endpoints, key=lambda one: one.key):
        grouped[one.key.place].append(one)
    for place, endpoints in sorted(grouped.items()):
        correlation = estimate_correlation([_endpoints(endpoints)], facts.errors, settings.correlation)
        regions[place] = _Region(place, facts.places[place], endpoints, levels, settings, correlation)
        regions[place].descend()
    for gpu_type in sorted({place.gpu_type for place in regions}):
        of_type = [region for place, region in regions.items() if place.gpu_type == gpu_type]
        fleet = _Fleet(of_type, levels, settings, facts.errors)
        fleet.complete()
        fleet.compare()
    return Reserve(
        sizes=tuple(size for region in regions.values() if (size := region.size()) is not None),
        endpoints=tuple(sorted((one for region in regions.values() for one in region.chosen()), key=lambda o: o.key)),
        left_out=facts.left_out,
    )


@dataclass(frozen=True, slots=True)
class _Levels:
    """Standard normal quantiles: `sized` for reserves, `upper` of the forecasts' upper peaks."""

    sized: float
    upper: float

    def deviation(self, one: ReserveEndpoint) -> float:
        """The standard deviation of an endpoint's peak, in tokens/s."""
        return (one.upper - one.median) / self.upper


def _load(one: ReserveEndpoint, instances: int, scale: float, levels: _Levels) -> ReserveLoad:
    """What an endpoint takes of a reserve beyond so many instances, where `scale` times its demand comes."""
    capacity = instances * one.tokens_per_s
    deviation = scale * levels.deviation(one)
    short = shortfall_of(scale * one.median, deviation, capacity)
    mean = short.probability * one.share(short.mean / short.probability) if short.mean > 0 else 0.0
    return ReserveLoad(
        mean=mean,
        deviation=short.deviation * one.gpus / one.tokens_per_s,
        alone=one.share(scale * one.median + levels.sized * deviation - capacity),
    )


def _endpoints(some: Iterable[ReserveEndpoint]) -> list[Endpoint]:
    return [one.key.endpoint for one in some]


class _Region:
    """A region on one GPU type. `counts`: own instances. `slots`: of its reserve; `missing`: those without capacity.
    `correlation`: of the errors of its endpoints.
    """

    def __init__(
        self,
        place: RegionGpu,
        room: ReservePlace,
        endpoints: list[ReserveEndpoint],
        levels: _Levels,
        settings: ReserveSettings,
        correlation: ErrorCorrelation,
    ) -> None:
        self.place = place
        self.room = room
        self.endpoints = {one.key: one for one in endpoints}
        self.counts = {one.key: one.alone for one in endpoints}
        self.slots = self.missing = 0
        self.alone_gpus = sum(one.gpus * one.alone for one in endpoints)
        self._settings = settings
        self._levels = levels
        self._correlation = correlation

    @property
    def own_gpus(self) -> int:
        return sum(one.gpus * self.counts[key] for key, one in self.endpoints.items())

    @property
    def slots_max(self) -> int:
        """Slots that own instances leave room for."""
        return self.room.slots_beside(self.own_gpus)

    def descend(self) -> None:
        """Give up own instances, one by one, and keep the best state on the way."""
        counts, total = dict(self.counts), ReserveSum(self._levels.sized, self._correlation.value)
        for key, one in self.endpoints.items():
            total.add(self._home(one, counts[key]))
        own, least = self.own_gpus, self._least_slots(counts)
        queue = [step for one in self.endpoints.values() if (step := self._step(one, counts[one.key])) is not None]
        heapq.heapify(queue)
        taken: list[EndpointGpu] = []
        best, best_steps = self._score(own, total, least), 0
        while queue:
            _, key = heapq.heappop(queue)
            one = self.endpoints[key]
            total.add(self._home(one, counts[key]), -1)
            counts[key] -= 1
            total.add(self._home(one, counts[key]))
            own, least = own - one.gpus, max(least, self._least_of(one, counts[key]))
            taken.append(key)
            if (step := self._step(one, counts[key])) is not None:
                heapq.heappush(queue, step)
            if (score := self._score(own, total, least)) < best:
                best, best_steps = score, len(taken)
        for key in taken[:best_steps]:
            self.counts[key] -= 1
        self._settle()

    @property
    def gpus(self) -> int:
        """GPUs taken, and those that are missing."""
        return self.own_gpus + (self.slots + self.missing) * self.room.slot_gpus

    def add_slot(self) -> None:
        self.slots += 1

    def keep_alone(self) -> None:
        """Plan without a reserve."""
        self.counts = {key: one.alone for key, one in self.endpoints.items()}
        self.slots = self.missing = 0

    def wanted(self) -> float:
        """GPUs that its whole demand, not only the share at home, lacks of the reserve."""
        return self._sum(1.0).gpus - self._settings.fill * self.slots * self.room.slot_gpus

    def size(self) -> ReserveSize | None:
        """The reserve; None where there is none, and none is missing."""
        if not self.slots and not self.missing:
            return None
        step = self.room.slot_gpus
        return ReserveSize(
            place=self.place,
            gpus=self.slots * step,
            slot_gpus=step,
            missing_gpus=self.missing * step,
            reason=self._reason(),
            worker_gpus=self.room.worker_gpus,
        )

    def chosen(self) -> Iterable[ReservedEndpoint]:
        for key, one in self.endpoints.items():
            yield ReservedEndpoint(
                key=key,
                instances=self.counts[key],
                gpus=one.gpus,
                reason=self._reason_of(one, self.counts[key]),
            )

    def _settle(self) -> None:
        wanted = self._slots_wanted(self._sum(self._settings.epsilon), self._least_slots(self.counts))
        self.slots = min(wanted, self.slots_max)
        self.missing = wanted - self.slots

    def _home(self, one: ReserveEndpoint, instances: int) -> ReserveLoad:
        return _load(one, instances, self._settings.epsilon, self._levels)

    def _sum(self, scale: float) -> ReserveSum:
        total = ReserveSum(self._levels.sized, self._correlation.value)
        for key, one in self.endpoints.items():
            total.add(_load(one, self.counts[key], scale, self._levels))
        return total

    def _step(self, one: ReserveEndpoint, instances: int) -> tuple[float, EndpointGpu] | None:
        """The next instance that an endpoint gives up, by what this adds to the reserve for each GPU."""
        if not instances:
            return None
        more = self._home(one, instances - 1).alone - self._home(one, instances).alone
        return more / one.gpus, one.key

    def _least_of(self, one: ReserveEndpoint, instances: int) -> int:
        """Slots of which an instance each makes up an endpoint's minimum."""
        return max(0, one.fewest - instances)

    def _least_slots(self, counts: Mapping[EndpointGpu, int]) -> int:
        return max((self._least_of(one, counts[key]) for key, one in self.endpoints.items()), default=0)

    def _slots_wanted(self, total: ReserveSum, least: int) -> int:
        return max(least, slots_for(total.gpus, self.room.slot_gpus, self._settings.fill))

    def _score(self, own: int, total: ReserveSum, least: int) -> _Score:
        wanted = self._slots_wanted(total, least)
        step, free = self.room.slot_gpus, self.room.free_gpus - own
        missing = max(0, wanted - self.room.slots_beside(own))
        return max(0, -free), missing * step, own + wanted * step, abs(wanted * step - self.room.present_gpus)

    def _reason(self) -> str:
        needed, percent = self._sum(1.0), f"{100 * self._settings.quantile:g} %"
        words = (
            f"{len(self.endpoints)} models need {needed.gpus:.2f} GPUs beyond their own instances in {percent} of hours"
            f" ({needed.alone:.2f} if each kept a reserve of its own; errors of forecasts: {self._correlation});"
            f" they have {self.own_gpus} GPUs of their own, {self.alone_gpus} without a reserve"
        )
        if self.missing:
            words += f"; {self.missing * self.room.slot_gpus} GPUs are missing: {self.place.region} has no more"
        return words

    def _reason_of(self, one: ReserveEndpoint, instances: int) -> str:
        percent = f"{100 * self._settings.upper_quantile:g} %"
        words = f"median peak {one.median:.0f} tokens/s, at most {one.upper:.0f} in {percent} of hours"
        if not self.slots:
            return f"{words}; the region needs no reserve"
        if not instances:
            return f"{words}: served from the reserve's {self.slots} slots"
        return (
            f"{words}: {instances} of its own, what these cannot begin in time goes to the reserve's {self.slots} slots"
        )


class _Fleet:
    """All regions of a GPU type. A model's regions have a correlation of their own, and models that of the regions."""

    def __init__(self, regions: list[_Region], levels: _Levels, settings: ReserveSettings, errors: PeakErrors) -> None:
        self._regions = regions
        self._settings = settings
        self._levels = levels
        self._models: dict[str, list[_Region]] = defaultdict(list)
        for region in regions:
            for key in region.endpoints:
                self._models[key.model].append(region)
        groups = [_endpoints(region.endpoints.values()) for region in regions]
        self._correlation = estimate_correlation(groups, errors, settings.correlation)
        self._of_models = {
            model: estimate_correlation(
                [[Endpoint(model=model, region=region.place.region) for region in its]], errors, settings.correlation
            )
            for model, its in self._models.items()
        }

    def complete(self) -> None:
        """Add slots, or instances, until the global row holds or nothing fits any more."""
        loads = {model: self._of_model(model) for model in sorted(self._models)}
        total = ReserveSum(self._levels.sized, self._correlation.value)
        for load in loads.values():
            total.add(load)
        while (lacking := total.gpus - self._filled()) > 1e-9:
            slot, instance = self._best_slot(lacking), self._best_instance(loads, total)
            if instance is not None and (slot is None or instance[0] >= slot[0]):
                _, region, key = instance
                region.counts[key] += 1
                total.add(loads[key.model], -1)
                loads[key.model] = self._of_model(key.model)
                total.add(loads[key.model])
            elif slot is not None:
                slot[1].add_slot()
            else:
                region = max(self._regions, key=lambda region: (region.wanted(), region.place))
                region.missing += slots_for(lacking, region.room.slot_gpus, self._settings.fill)
                return

    def compare(self) -> None:
        """Plan without reserves where they take more GPUs, and there are as many."""
        fits = all(region.alone_gpus <= region.room.free_gpus for region in self._regions)
        alone = sum(region.alone_gpus for region in self._regions)
        if fits and sum(region.gpus for region in self._regions) > alone:
            for region in self._regions:
                region.keep_alone()

    def _filled(self) -> float:
        """GPUs that may be taken of all reserves, with those that are missing already."""
        slots = ((region.slots + region.missing) * region.room.slot_gpus for region in self._regions)
        return self._settings.fill * sum(slots)

    def _best_slot(self, lacking: float) -> tuple[float, _Region] | None:
        """The region that lacks most and has capacity, and what a slot there is worth for each of its GPUs."""
        open_regions = [region for region in self._regions if region.slots < region.slots_max]
        if not open_regions:
            return None
        region = max(open_regions, key=lambda region: (region.wanted(), region.place))
        gpus = region.room.slot_gpus
        return min(lacking, self._settings.fill * gpus) / gpus, region

    def _best_instance(
        self, loads: Mapping[str, ReserveLoad], total: ReserveSum
    ) -> tuple[float, _Region, EndpointGpu] | None:
        """One more instance of the model that lacks most, in the region where it lacks most and that has capacity."""
        model = max(loads, key=lambda name: (loads[name].alone, name))
        found = []
        for region in self._models[model]:
            key = EndpointGpu(model=model, region=region.place.region, gpu_type=region.place.gpu_type)
            one, count = region.endpoints[key], region.counts[key]
            taken = region.own_gpus + region.slots * region.room.slot_gpus
            if count < one.most and taken + one.gpus <= region.room.free_gpus:
                found.append((one.upper - count * one.tokens_per_s, region, key))
        if not found:
            return None
        _, region, key = max(found, key=lambda each: (each[0], each[2]))
        before = total.gpus
        total.add(loads[model], -1)
        region.counts[key] += 1
        more = self._of_model(model)
        total.add(more)
        after = total.gpus
        total.add(more, -1)
        total.add(loads[model])
        region.counts[key] -= 1
        return (before - after) / region.endpoints[key].gpus, region, key

    def _of_model(self, model: str) -> ReserveLoad:
        """What the whole demand of a model lacks, over all its regions."""
        regions = self._models[model]
        ones = [
            region.endpoints[EndpointGpu(model=model, region=region.place.region, gpu_type=region.place.gpu_type)]
            for region in regions
        ]
        first = ones[0]
        deviations = [self._levels.deviation(one) for one in ones]
        correlation = self._of_models[model].value
        variance = (1 - correlation) * sum(each**2 for each in deviations) + correlation * sum(deviations) ** 2
        median = sum(one.median for one in ones)
        capacity = sum(region.counts[one.key] * one.tokens_per_s for region, one in zip(regions, ones, strict=True))
        short = shortfall_of(median, variance**0.5, capacity)
        mean = short.probability * first.share(short.mean / short.probability) if short.mean > 0 else 0.0
        upper = median + self._levels.sized * variance**0.5
        return ReserveLoad(
            mean=mean,
            deviation=short.deviation * first.gpus / first.tokens_per_s,
            alone=first.share(upper - capacity),
        )
