"""What it costs not to make a change: the cost of the placement with that one change undone.

Taken back means: the cell stands at its count of before, or as near to it as limits and the GPUs that the rest of the
plan leaves allow; every other cell, pool and endpoint stays as planned. What is then not served, or below a minimum
or a replica override, costs what the rows of the program say (cost.py), and so do instances that are kept for nothing;
starts that donated instances save are shared out anew. For an endpoint that goes into a pool, the change is the whole
of it: it leaves the pool, which shrinks if it can, and its cells stand at their counts of before.

The result is the rise of the objective per hour. It is 0 where nothing nearer to the count of before is possible: the
change is then no choice. Within the solver's gap, and where changes only make sense together, it may be below 0.
"""

from collections import ChainMap

from controlplane.policies.facts import Endpoint, EndpointGpu, RegionGpu
from controlplane.policies.placement.cost import endpoint_cost, place_cost, pool_gpus_needed, unserved_cost
from controlplane.policies.placement.grid import Answer, Cell, EndpointRow, Grid, ModelRow, PlaceRow


class Marginals:
    """The price of each change of an answer."""

    def __init__(self, grid: Grid, answer: Answer) -> None:
        self._grid = grid
        self._answer = answer
        self._counts = dict(answer.counts)
        self._models: dict[str, ModelRow] = {row.name: row for row in grid.models}
        self._places: dict[RegionGpu, PlaceRow] = {row.place: row for row in grid.places}
        self._endpoints: dict[Endpoint, EndpointRow] = {
            endpoint.endpoint: endpoint for row in grid.models for endpoint in row.endpoints
        }
        self._served = {
            row.name: sum(endpoint_cost(grid, each, self._counts, answer.pooled)[1] for each in row.endpoints)
            for row in grid.models
        }
        self._free = {row.place: self._free_gpus(row) for row in grid.places}

    def of_cell(self, cell: Cell) -> float:
        """What the objective rises by if this cell does not change."""
        if self._count(cell) == cell.present:
            return 0.0
        endpoint = self._endpoints[cell.endpoint]
        if any(option.key in self._answer.pooled for option in endpoint.options):
            return self.of_pooling(endpoint)
        return self._rise(endpoint, self._taken_back(cell, endpoint))

    def of_pooling(self, endpoint: EndpointRow) -> float:
        """What the objective rises by if this endpoint does not go into its pool; 0 if it was there before."""
        option = next(each for each in endpoint.options if each.key in self._answer.pooled)
        if option.before:
            return 0.0
        place, row = option.key.place, self._places[option.key.place]
        pooled = self._answer.pooled - {option.key}
        before = self._answer.pool_gpus.get(option.pool, 0)
        pool = next(each for each in row.pools if each.key == option.pool)
        gpus = min(before, pool_gpus_needed(self._grid, row, pool, pooled))
        counts: dict[EndpointGpu, int] = {}
        left = endpoint.most
        for cell in endpoint.cells:
            free = self._free[cell.place] + (before - gpus if cell.place == place else 0)
            fits = min(cell.present, cell.most, free // cell.profile.gpus)
            counts[cell.key] = fits if left is None else min(fits, left)
            left = None if left is None else left - counts[cell.key]
        return self._rise(endpoint, Answer(counts=counts, pooled=pooled, pool_gpus={option.pool: gpus}))

    def _taken_back(self, cell: Cell, endpoint: EndpointRow) -> Answer:
        count = self._count(cell)
        target = cell.present
        if target > count:
            target = min(target, cell.most, count + self._free[cell.place] // cell.profile.gpus)
            if endpoint.most is not None:
                target = min(target, count + endpoint.most - sum(self._count(each) for each in endpoint.cells))
        changed = {cell.key: max(target, count) if cell.present > count else target}
        return Answer(counts=changed, pooled=self._answer.pooled)

    def _rise(self, endpoint: EndpointRow, trial: Answer) -> float:
        """The objective of a trial less the answer's; only what can differ is added up."""
        row, served = self._models[endpoint.endpoint.model], self._served[endpoint.endpoint.model]
        counts = ChainMap(dict(trial.counts), self._counts)
        before, served_before = endpoint_cost(self._grid, endpoint, self._counts, self._answer.pooled)
        after, served_after = endpoint_cost(self._grid, endpoint, counts, trial.pooled)
        rise = after - before + unserved_cost(row, served - served_before + served_after) - unserved_cost(row, served)
        pool_gpus = ChainMap(dict(trial.pool_gpus), dict(self._answer.pool_gpus))
        resized = {pool.place for pool in trial.pool_gpus}
        touched = {cell.place for cell in endpoint.cells if cell.key in trial.counts} | resized
        for place in sorted(touched):
            here = self._places[place]
            if here.donated_gpus or place in resized:
                rise += place_cost(self._grid, here, counts, pool_gpus)
                rise -= place_cost(self._grid, here, self._counts, self._answer.pool_gpus)
        return rise

    def _count(self, cell: Cell) -> int:
        return self._answer.counts.get(cell.key, 0)

    def _free_gpus(self, row: PlaceRow) -> int:
        used = sum(cell.profile.gpus * self._count(cell) for cell in row.cells)
        return row.capacity - used - sum(self._answer.pool_gpus.get(pool.key, 0) for pool in row.pools)
