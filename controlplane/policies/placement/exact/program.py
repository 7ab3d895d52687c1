"""The placement problem as an integer program (SageServe 5), with pools and donated instances.

    x_ijk instances of model i in region j on GPU type k; u_ijk of them started, a_ijk and b_ijk of these from spot
    instances of the same model and of others; z_ijk pooled there or not (0, 1), Z_ij = sum_k z_ijk; P_jks GPUs of the
    pool whose workers have s GPUs, whole slots of them: P_jks = slot_jks N_jks

    sum_k x_ijk theta_ik + home_ij + eps max_w rho_ij(w) Z_ij  >= eps max_w rho_ij(w)     each i, j
    sum_jk x_ijk theta_ik + global_i + sum_j rho_ij(w*) Z_ij   >= max_w sum_j rho_ij(w)   each i; w* its busiest window
    sum_k x_ijk + few_ij + min_ij Z_ij >= min_ij,  sum_k x_ijk <= max_ij (1 - Z_ij)       each i, j; Z_ij <= 1
    sum_i x_ijk g_ik + sum_s P_jks <= V_jk, P_jks <= most_jks                             each j, k
    u_ijk >= x_ijk - n_ijk, u_ijk >= 0                                                    (no big-M)
    a_ijk <= spot_ijk,  a_ijk + b_ijk <= u_ijk,  sum_i g_ik (a_ijk + b_ijk) <= sum_i g_ik spot_ijk
    sum_i z_ijk o_ijk <= fill P_jks, sum_i z_ijk weights_i <= host_k P_jks                over i with g_ik = s

    minimise  sum price_ik x + sum alpha_k P + starts + moves + prices of home, global, few         (cost.py)

A replica override is a minimum and a maximum at once, at a price above all others. `home`, `global` and `few` take up
what capacity cannot hold, so the program always has a solution. The cost is the whole fleet's, not the change of it: a
gap then means something. Moves are starts and stops at a price that only breaks ties. An instance counts in a demand
row for no more than the row asks: the integer answers stay the same, and the relaxation cannot serve a small model with
a sliver of an instance. Rows are divided by what an instance does there: their numbers count instances.
"""

import math
from collections import Counter
from typing import Any

import pulp

from controlplane.policies.facts import EndpointGpu, PoolKey
from controlplane.policies.placement.grid import (
    Answer,
    Cell,
    EndpointRow,
    Grid,
    ModelRow,
    PlaceRow,
    PoolOption,
    PoolRow,
)
from controlplane.policies.placement.highs import highs_of


class Program:
    """The integer program of a grid, and its answer once it is solved.

    Attributes:
        problem: rows and objective. `highs`: HiGHS with it.
        counts: the variable of each cell's instances; `pooled` of each pooling option, `pool_gpus` of each pool's GPUs.
    """

    def __init__(self, grid: Grid) -> None:
        """Build it: variables of cells and options first, then the rows in which they stand."""
        self.problem = pulp.LpProblem("placement", pulp.LpMinimize)
        self.counts: dict[EndpointGpu, Any] = {}
        self.pooled: dict[EndpointGpu, Any] = {}
        self.pool_gpus: dict[PoolKey, Any] = {}
        self._grid = grid
        self._cost: list[Any] = []
        self._started: dict[EndpointGpu, Any] = {}
        self._made: Counter[str] = Counter()
        for cell in grid.cells:
            self._add_cell(cell)
        for option in grid.options:
            self._add_option(option)
        for model in grid.models:
            self._add_model(model)
        for place in grid.places:
            self._add_place(place)
        self.problem.setObjective(pulp.lpSum(self._cost))
        self.highs = highs_of(self.problem)

    def answer(self) -> Answer:
        """The solver's answer, in whole numbers."""
        values = self.highs.getSolution().col_value
        for variable in self.problem.variables():
            variable.varValue = values[variable.index]
        return Answer(
            counts={key: round(count.varValue) for key, count in self.counts.items()},
            pooled=frozenset(key for key, pooled in self.pooled.items() if round(pooled.varValue)),
            pool_gpus={pool: round(gpus.value()) for pool, gpus in self.pool_gpus.items()},
        )

    def _add_cell(self, cell: Cell) -> None:
        count = self._variable("x", cell.most, pulp.LpInteger)
        started = self._variable("u")
        self._add_row(started - count >= -cell.present)
        move = self._grid.move_price
        self._cost.append((cell.price_per_hour - move) * count + (cell.fresh_price + 2 * move) * started)
        self._cost.append(move * cell.present)
        self.counts[cell.key] = count
        self._started[cell.key] = started

    def _add_option(self, option: PoolOption) -> None:
        pooled = self._variable("z", 1, pulp.LpInteger)
        move = self._grid.move_price
        self._cost.append(move - move * pooled if option.before else move * pooled)
        self.pooled[option.key] = pooled

    def _add_model(self, row: ModelRow) -> None:
        served = []
        for endpoint in row.endpoints:
            pooled = [self.pooled[option.key] for option in endpoint.options]
            served += [endpoint.busiest * each for each in pooled if endpoint.busiest]
            self._add_limits(endpoint, pooled)
            at_home = [endpoint.home * each for each in pooled]
            self._add_demand(endpoint.cells, at_home, endpoint.home, endpoint.home_price)
        cells = tuple(cell for endpoint in row.endpoints for cell in endpoint.cells)
        self._add_demand(cells, served, row.peak, row.price)

    def _add_place(self, row: PlaceRow) -> None:
        taken = [cell.profile.gpus * self.counts[cell.key] for cell in row.cells]
        for pool in row.pools:
            if pool.options:
                taken.append(self._add_pool(row, pool))
            elif pool.before:
                self._cost.append(self._grid.move_price * pool.before)
        if taken:
            self._add_row(pulp.lpSum(taken) <= row.capacity)
        if row.donated_gpus:
            self._add_donated(row)

    def _add_limits(self, endpoint: EndpointRow, pools: list[Any]) -> None:
        total, pooled = pulp.lpSum(self.counts[cell.key] for cell in endpoint.cells), pulp.lpSum(pools)
        if endpoint.most is not None and endpoint.cells:
            self._add_row(total + endpoint.most * pooled <= endpoint.most)
        if pools:
            self._add_row(pooled <= 1)
        for cell in endpoint.cells if pools else ():
            self._add_row(self.counts[cell.key] + cell.most * pooled <= cell.most)
        if endpoint.fewest:
            few = self._variable("few")
            self._add_row(total + few + endpoint.fewest * pooled >= endpoint.fewest)
            self._cost.append(endpoint.few_price * few)

    def _add_demand(self, cells: tuple[Cell, ...], pooled: list[Any], wanted: float, price: float) -> None:
        if wanted <= 0:
            return
        unit = min(wanted, max((cell.profile.tokens_per_s for cell in cells), default=wanted))
        short = self._variable("short")
        served = [min(cell.profile.tokens_per_s, wanted) / unit * self.counts[cell.key] for cell in cells]
        served += [1 / unit * each for each in pooled]
        self._add_row(pulp.lpSum(served) + short >= wanted / unit)
        self._cost.append(price * unit * short)

    def _add_pool(self, row: PlaceRow, pool: PoolRow) -> Any:
        gpus = pool.step * self._variable("p", pool.most // pool.step, pulp.LpInteger)
        added = self._variable("q")
        self._add_row(added - gpus >= -pool.before)
        move = self._grid.move_price
        self._cost.append((row.gpu_price - move) * gpus + 2 * move * added + move * pool.before)
        occupied = pulp.lpSum(option.occupancy * self.pooled[option.key] for option in pool.options)
        self._add_row(occupied <= self._grid.fill * gpus)
        if any(option.weights_bytes for option in pool.options):
            shares = [option.weights_bytes / row.host_bytes_per_gpu for option in pool.options]
            weights = (share * self.pooled[each.key] for share, each in zip(shares, pool.options, strict=True))
            self._add_row(pulp.lpSum(weights) <= gpus)
        self.pool_gpus[pool.key] = gpus
        return gpus

    def _add_donated(self, row: PlaceRow) -> None:
        """Starts from donated instances: variables only where they save something."""
        taken = []
        for cell in row.cells:
            offers = []
            for price, most in ((cell.donated_same_price, cell.donated), (cell.donated_other_price, None)):
                if most != 0 and price < cell.fresh_price:
                    offers.append(self._variable("d", most))
                    self._cost.append((price - cell.fresh_price) * offers[-1])
            if offers:
                self._add_row(pulp.lpSum(offers) <= self._started[cell.key])
                taken += [cell.profile.gpus * each for each in offers]
        if taken:
            self._add_row(pulp.lpSum(taken) <= row.donated_gpus)

    def _variable(self, letter: str, most: float | None = None, kind: str = pulp.LpContinuous) -> Any:
        """A variable from 0 to `most`, numbered within its letter."""
        self._made[letter] += 1
        return self.problem.add_variable(f"{letter}{self._made[letter]:07d}", 0, most, kind)

    def _add_row(self, row: Any) -> None:
        self.problem.addConstraint(row)


def least_cost(grid: Grid) -> float:
    """A lower bound on the cost per hour of the demand: as if instances were divisible; at most that of all GPUs."""
    gpu_prices = {row.place: row.gpu_price for row in grid.places}
    total = 0.0
    for model in grid.models:
        cells = [cell for endpoint in model.endpoints for cell in endpoint.cells]
        rate = min((cell.price_per_hour / cell.profile.tokens_per_s for cell in cells), default=0.0)
        for endpoint in model.endpoints:
            pools = [gpu_prices[option.key.place] * option.occupancy for option in endpoint.options]
            total += min([rate * endpoint.busiest, *(price / grid.fill for price in pools)])
    return min(total, math.fsum(row.gpu_price * row.capacity for row in grid.places))
