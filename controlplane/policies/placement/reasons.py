"""Why a placement is as it is, in plain words from the rows that bind: take one instance away and see what breaks."""

from msgspec import structs

from controlplane.policies.facts import Endpoint, EndpointGpu, RegionGpu
from controlplane.policies.placement.decision import BelowMinimum, Constraint, Unserved
from controlplane.policies.placement.facts import PlacementFacts, PlacementSettings
from controlplane.policies.placement.grid import Answer, Cell, EndpointRow, Grid, ModelRow, PoolOption

# Shortages below this share of what was asked are the solver's rounding.
ROUNDING = 1e-6


class Explanation:
    """A solved placement that can be asked about."""

    def __init__(self, facts: PlacementFacts, settings: PlacementSettings, grid: Grid, answer: Answer) -> None:
        self._facts = facts
        self._settings = settings
        self._grid = grid
        self._models: dict[str, ModelRow] = {row.name: row for row in grid.models}
        self._rows: dict[Endpoint, EndpointRow] = {
            row.endpoint: row for model in grid.models for row in model.endpoints
        }
        self._after = {cell.key: answer.counts.get(cell.key, 0) for cell in grid.cells}
        self._pool_of: dict[Endpoint, PoolOption] = {
            row.endpoint: option for row in self._rows.values() for option in row.options if option.key in answer.pooled
        }
        self._instances: dict[Endpoint, int] = {}
        self._throughput: dict[Endpoint, float] = {}
        self._served: dict[str, float] = {}
        self._gpus_used: dict[RegionGpu, int] = {}
        for pool, gpus in answer.pool_gpus.items():
            self._gpus_used[pool.place] = self._gpus_used.get(pool.place, 0) + gpus
        for endpoint, row in self._rows.items():
            self._instances[endpoint] = sum(self._after[cell.key] for cell in row.cells)
            instances = sum(cell.profile.tokens_per_s * self._after[cell.key] for cell in row.cells)
            self._throughput[endpoint] = row.busiest if endpoint in self._pool_of else instances
            self._served[endpoint.model] = self._served.get(endpoint.model, 0.0) + self._throughput[endpoint]
        for cell in grid.cells:
            self._gpus_used[cell.place] = self._gpus_used.get(cell.place, 0) + cell.profile.gpus * self._after[cell.key]

    def of_cell(self, cell: Cell) -> tuple[str, Constraint]:
        """Why this cell has as many instances as it has, and the constraint that makes it so."""
        after = self._after[cell.key]
        row = self._rows[cell.endpoint]
        few, short = self._is_below_minimum(row), self._home_shortage(row) > 0
        why, constraint = self._what_holds(cell, row) if after else self._why_empty(cell, row)
        if few:
            why += f"; fewer than the {row.fewest} wanted: {self._what_limits(row)}"
        elif short:
            why += f"; {self._what_limits(row)}"
        if after == cell.present:
            return f"no change: {why}", constraint
        if cell.present > cell.most:
            return self._no_room(cell, row, why)
        if after < cell.present and constraint != Constraint.OVERRIDE:
            full = self._gpus_left(cell.place) < cell.profile.gpus
            constraint = Constraint.CAPACITY if full else Constraint.COST
            if not (few or short) and cell.endpoint not in self._pool_of:
                fell = "demand fell" if self._shrank(cell.key.model) else "no longer needed"
                why = f"{fell}: {after} is enough, {why}" if after else f"{fell}: {why}"
        return why, constraint

    def of_pooled(self, row: EndpointRow) -> str:
        """Why an endpoint is pooled."""
        option = self._pool_of[row.endpoint]
        place = option.key.place
        gpu_price = self._facts.gpu_cost_per_hour[place.gpu_type]
        text = (
            f"takes {option.occupancy:.3g} of a pool GPU, {gpu_price * option.occupancy / self._grid.fill:.2f} an hour"
        )
        dedicated = min((cell.price_per_hour for cell in row.cells if cell.most), default=None)
        if dedicated is None:
            return f"{text}; there is no room for an instance of its own"
        return f"{text}; an instance of its own costs {dedicated:.2f}"

    def unserved(self) -> tuple[Unserved, ...]:
        """Demand beyond what is placed: first what no region serves, then what is not served at home."""
        nowhere, away = [], []
        for model in self._grid.models:
            missing = model.peak - self._served.get(model.name, 0.0)
            if missing > ROUNDING * model.peak:
                limits = "; ".join(dict.fromkeys(self._what_limits(row) for row in model.endpoints))
                nowhere.append(Unserved(model=model.name, region=None, tokens_per_s=missing, reason=limits))
            for row in model.endpoints:
                if (lacking := self._home_shortage(row)) > 0:
                    reason = f"not served at home; {self._what_limits(row)}"
                    region = row.endpoint.region
                    away.append(Unserved(model=model.name, region=region, tokens_per_s=lacking, reason=reason))
        return (*nowhere, *away)

    def below_minimum(self) -> tuple[BelowMinimum, ...]:
        """Endpoints with fewer instances than their minimum or replica override."""
        return tuple(
            BelowMinimum(
                endpoint=endpoint,
                minimum=row.fewest,
                placed=self._instances[endpoint],
                reason=("pinned; " if endpoint in self._facts.overrides else "") + self._what_limits(row),
            )
            for endpoint, row in sorted(self._rows.items(), key=lambda item: item[0])
            if self._is_below_minimum(row)
        )

    def _is_below_minimum(self, row: EndpointRow) -> bool:
        return self._instances[row.endpoint] < row.fewest and row.endpoint not in self._pool_of

    def _no_room(self, cell: Cell, row: EndpointRow, why: str) -> tuple[str, Constraint]:
        if cell.endpoint in self._facts.overrides:
            return why, Constraint.OVERRIDE
        text = f"no more than {cell.most} fit in {cell.key.region}: {self._usage(cell.place)}; {why}"
        return text, Constraint.MAXIMUM if cell.most == row.most else Constraint.CAPACITY

    def _shrank(self, model: str) -> bool:
        """Whether a model has less throughput than before, over all regions."""
        cells = [cell for row in self._models[model].endpoints for cell in row.cells]
        before = sum(cell.profile.tokens_per_s * cell.present for cell in cells)
        return self._served[model] < before * (1 - ROUNDING)

    def _what_holds(self, cell: Cell, row: EndpointRow) -> tuple[str, Constraint]:
        """The first row that one instance less would violate: replica override, home row, minimum or global row."""
        one, throughput = cell.profile.tokens_per_s, self._throughput[row.endpoint]
        if (override := self._facts.overrides.get(row.endpoint)) is not None:
            return f"pinned to {override}", Constraint.OVERRIDE
        if row.home > 0 and throughput - one < row.home * (1 - ROUNDING):
            return self._home_message(cell, row), Constraint.HOME
        if self._instances[row.endpoint] <= row.fewest:
            return f"minimum {row.fewest}", Constraint.MINIMUM
        model = self._models[cell.key.model]
        if self._served[model.name] - one < model.peak * (1 - ROUNDING):
            return self._cover_message(model, row), Constraint.GLOBAL
        return "not needed by any row; kept within the solver's gap", Constraint.NONE

    def _home_message(self, cell: Cell, row: EndpointRow) -> str:
        count, one = self._after[cell.key], cell.profile.tokens_per_s
        peak, share = self._facts.peak_of(row.endpoint), self._settings.epsilon
        text = f"peak {peak:,.0f} tokens/s x {share:g} at home needs {_instances(count)} of {one:,.0f}"
        here = [each for each in row.cells if self._after[each.key]]
        others = [f"{self._after[each.key]} on {each.key.gpu_type}" for each in here if each.key != cell.key]
        return f"{text} beside {' and '.join(others)}" if others else text

    def _cover_message(self, model: ModelRow, row: EndpointRow) -> str:
        """Whose demand this endpoint covers in the model's busiest window: its own rest, or the neediest regions'."""

        def lack(of: EndpointRow) -> float:
            return of.busiest - self._throughput[of.endpoint]

        spare = -lack(row)
        needy = [(lack(each), each.endpoint.region) for each in model.endpoints if each is not row]
        needy = sorted(((much, region) for much, region in needy if much > 0), reverse=True)
        if spare > 0 and needy:
            much = min(spare, sum(lacking for lacking, _ in needy))
            return f"covers {much:,.0f} tokens/s of {', '.join(region for _, region in needy)}"
        return f"the model's peak over all regions needs it: {row.busiest:,.0f} tokens/s are asked for here"

    def _why_empty(self, cell: Cell, row: EndpointRow) -> tuple[str, Constraint]:
        if (override := self._facts.overrides.get(row.endpoint)) is not None:
            return f"pinned to {override}", Constraint.OVERRIDE
        if (option := self._pool_of.get(row.endpoint)) is not None:
            return f"pooled on {option.key.gpu_type}", Constraint.COST
        if self._facts.peak_of(row.endpoint) == 0 and not row.fewest:
            return "no demand", Constraint.NONE
        elsewhere = sorted(
            f"{each.key.gpu_type} in {each.key.region}"
            for endpoint in self._models[cell.key.model].endpoints
            for each in endpoint.cells
            if self._after[each.key]
        )
        if not elsewhere:
            return "none placed", Constraint.NONE
        more = f" and {len(elsewhere) - 3} more" if len(elsewhere) > 3 else ""
        return f"served by {', '.join(elsewhere[:3])}{more}", Constraint.NONE

    def _what_limits(self, row: EndpointRow) -> str:
        """What keeps an endpoint from one more instance."""
        endpoint = row.endpoint
        if row.most is not None and self._instances[endpoint] >= row.most:
            word = "pinned to" if endpoint in self._facts.overrides else "maximum"
            return f"{word} {row.most} in {endpoint.region}"
        gpu_types = sorted(key.gpu_type for key in self._facts.profiles if key.model == endpoint.model)
        places = [RegionGpu(region=endpoint.region, gpu_type=gpu_type) for gpu_type in gpu_types]
        keys = {place: EndpointGpu(model=endpoint.model, **structs.asdict(place)) for place in places}
        unfit = [self._facts.unfit[key] for key in keys.values() if key in self._facts.unfit]
        places = [each for each in places if self._facts.capacity.get(each, 0) and keys[each] not in self._facts.unfit]
        if unfit and not places:
            return "; ".join(unfit)
        if not places:
            return f"no GPU in {endpoint.region} that {endpoint.model} has a profile for"
        return f"GPUs full in {endpoint.region}: {', '.join(self._usage(place) for place in places)}"

    def _usage(self, place: RegionGpu) -> str:
        return f"{place.gpu_type} {self._gpus_used.get(place, 0)} of {self._facts.capacity.get(place, 0)}"

    def _gpus_left(self, place: RegionGpu) -> int:
        return self._facts.capacity.get(place, 0) - self._gpus_used.get(place, 0)

    def _home_shortage(self, row: EndpointRow) -> float:
        if row.endpoint in self._pool_of:
            return 0.0
        missing = row.home - self._throughput[row.endpoint]
        return missing if missing > ROUNDING * row.home else 0.0


def _instances(count: int) -> str:
    return f"{count} instance" if count == 1 else f"{count} instances"
