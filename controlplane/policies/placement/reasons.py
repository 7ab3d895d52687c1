"""Why a placement is as it is, in plain words from the rows that bind: take one instance away and see what breaks."""

import math
from collections.abc import Mapping

from controlplane.policies.facts import Endpoint, EndpointGpu, RegionGpu
from controlplane.policies.placement.facts import BelowMinimum, PlacementFacts, PlacementSettings, Unserved
from controlplane.policies.placement.program import Cell

# Shortages below this share of what was asked are the solver's rounding.
ROUNDING = 1e-6


class Explanation:
    """A solved placement that can be asked about. `after`: instances per cell."""

    def __init__(
        self,
        facts: PlacementFacts,
        settings: PlacementSettings,
        cells: tuple[Cell, ...],
        after: Mapping[EndpointGpu, int],
    ) -> None:
        self._facts = facts
        self._settings = settings
        self._after = after
        self._cells_of: dict[Endpoint, list[Cell]] = {}
        self._gpus_used: dict[RegionGpu, int] = {}
        for cell in cells:
            self._cells_of.setdefault(cell.endpoint, []).append(cell)
            self._gpus_used[cell.place] = self._gpus_used.get(cell.place, 0) + cell.profile.gpus * after[cell.key]

    def of_cell(self, cell: Cell) -> str:
        """Why this cell has as many instances as it has."""
        after = self._after[cell.key]
        short = self._home_shortage(cell.endpoint) > 0
        why = self._what_holds(cell) if after else self._why_empty(cell)
        if short:
            why += f"; {self._what_limits(cell.endpoint)}"
        if after == cell.present:
            return f"no change: {why}"
        if cell.present > cell.most:
            return f"no more than {cell.most} fit in {cell.key.region}: {self._usage_words(cell.place)}; {why}"
        if after < cell.present and not short:
            return f"demand fell: {after} is enough, {why}" if after else f"demand fell: {why}"
        return why

    def unserved(self) -> tuple[Unserved, ...]:
        """Demand beyond what is placed: first what no region serves, then what is not served at home."""
        nowhere, away = [], []
        for model in sorted(model.name for model in self._facts.models):
            peak = self._facts.global_peak_of(model)
            endpoints = [Endpoint(model=model, region=region) for region in sorted(self._facts.regions)]
            missing = peak - sum(self._throughput(endpoint) for endpoint in endpoints)
            if missing > ROUNDING * peak:
                limits = "; ".join(dict.fromkeys(self._what_limits(endpoint) for endpoint in endpoints))
                nowhere.append(Unserved(model=model, region=None, tokens_per_s=missing, reason=limits))
            for endpoint in endpoints:
                if (lacking := self._home_shortage(endpoint)) > 0:
                    reason = f"not served at home; {self._what_limits(endpoint)}"
                    away.append(Unserved(model=model, region=endpoint.region, tokens_per_s=lacking, reason=reason))
        return (*nowhere, *away)

    def below_minimum(self) -> tuple[BelowMinimum, ...]:
        """Endpoints with fewer instances than their minimum."""
        found = []
        for endpoint, (fewest, _) in sorted(self._facts.limits.items()):
            placed = self._instances(endpoint)
            if placed < fewest:
                reason = self._what_limits(endpoint)
                found.append(BelowMinimum(endpoint=endpoint, minimum=fewest, placed=placed, reason=reason))
        return tuple(found)

    def _what_holds(self, cell: Cell) -> str:
        """The first row that one instance less would break: the home row, the minimum, the global row."""
        endpoint, one = cell.endpoint, cell.profile.tokens_per_s
        peak = self._facts.peak_of(endpoint)
        at_home = self._settings.epsilon * peak
        if at_home > 0 and self._throughput(endpoint) - one < at_home * (1 - ROUNDING):
            return self._home_words(cell, peak)
        if self._instances(endpoint) <= self._facts.limits_of(endpoint)[0]:
            return f"minimum {self._facts.limits_of(endpoint)[0]}"
        total = sum(self._throughput(each) for each in self._endpoints(endpoint.model))
        if total - one < self._facts.global_peak_of(endpoint.model) * (1 - ROUNDING):
            return self._cover_words(endpoint)
        return "not needed by any row; kept within the solver's gap"

    def _home_words(self, cell: Cell, peak: float) -> str:
        here = [each for each in self._here(cell.endpoint) if self._after[each.key]]
        count, one = self._after[cell.key], cell.profile.tokens_per_s
        words = (
            f"peak {peak:,.0f} tokens/s x {self._settings.epsilon:g} at home needs {_instances(count)} of {one:,.0f}"
        )
        beside = [f"{self._after[each.key]} on {each.key.gpu_type}" for each in here if each.key != cell.key]
        return f"{words} beside {' and '.join(beside)}" if beside else words

    def _cover_words(self, endpoint: Endpoint) -> str:
        """Whose demand this endpoint covers in the model's busiest window: its own rest, or the neediest regions'."""
        window = self._facts.busiest_window_of(endpoint.model)

        def lack(of: Endpoint) -> float:
            return self._facts.demand_of(of)[window] - self._throughput(of)

        spare = -lack(endpoint)
        needy = [(lack(each), each.region) for each in self._endpoints(endpoint.model) if each != endpoint]
        needy = sorted(((much, region) for much, region in needy if much > 0), reverse=True)
        if spare > 0 and needy:
            much = min(spare, sum(lacking for lacking, _ in needy))
            return f"covers {much:,.0f} tokens/s of {', '.join(region for _, region in needy)}"
        demand = self._facts.demand_of(endpoint)[window]
        return f"the model's peak over all regions needs it: {demand:,.0f} tokens/s are asked for here"

    def _why_empty(self, cell: Cell) -> str:
        if self._facts.peak_of(cell.endpoint) == 0:
            return "no demand"
        elsewhere = sorted(
            f"{each.key.gpu_type} in {each.key.region}"
            for endpoint in self._endpoints(cell.key.model)
            for each in self._here(endpoint)
            if self._after[each.key]
        )
        if not elsewhere:
            return "none placed"
        more = f" and {len(elsewhere) - 3} more" if len(elsewhere) > 3 else ""
        return f"served by {', '.join(elsewhere[:3])}{more}"

    def _what_limits(self, endpoint: Endpoint) -> str:
        """What keeps an endpoint from one more instance."""
        most = self._facts.limits_of(endpoint)[1]
        if most is not None and self._instances(endpoint) >= most:
            return f"maximum {most} in {endpoint.region}"
        gpu_types = sorted(key.gpu_type for key in self._facts.profiles if key.model == endpoint.model)
        places = [RegionGpu(region=endpoint.region, gpu_type=gpu_type) for gpu_type in gpu_types]
        places = [place for place in places if self._facts.capacity.get(place, 0)]
        if not places:
            return f"no GPU in {endpoint.region} that {endpoint.model} has a profile for"
        return f"GPUs full in {endpoint.region}: {', '.join(self._usage_words(place) for place in places)}"

    def _usage_words(self, place: RegionGpu) -> str:
        return f"{place.gpu_type} {self._gpus_used.get(place, 0)} of {self._facts.capacity.get(place, 0)}"

    def _home_shortage(self, endpoint: Endpoint) -> float:
        wanted = self._settings.epsilon * self._facts.peak_of(endpoint)
        missing = wanted - self._throughput(endpoint)
        return missing if missing > ROUNDING * wanted else 0.0

    def _endpoints(self, model: str) -> list[Endpoint]:
        return [Endpoint(model=model, region=region) for region in sorted(self._facts.regions)]

    def _here(self, endpoint: Endpoint) -> list[Cell]:
        return self._cells_of.get(endpoint, [])

    def _instances(self, endpoint: Endpoint) -> int:
        return sum(self._after[cell.key] for cell in self._here(endpoint))

    def _throughput(self, endpoint: Endpoint) -> float:
        return math.fsum(cell.profile.tokens_per_s * self._after[cell.key] for cell in self._here(endpoint))


def _instances(count: int) -> str:
    return f"{count} instance" if count == 1 else f"{count} instances"
