"""A region as a whole, by HiGHS: what it costs at least at the prices of models' demand, with whole instances.

Regions share nothing but the demand of models. The prices of a place's GPUs may mix two configurations of an endpoint,
an integer program of the region may not, so its bound is higher where a few large instances fill a place. The sum over
regions is again a bound on the fleet (Lagrangian relaxation of the demand rows alone).

The program is that of the whole problem (`exact/program.py`), of a fleet that has this region alone. Each model asks
for all that the region could serve, at the price of its demand: so what is served earns that price.
"""

from collections.abc import Callable

from controlplane.policies.placement.exact.program import Program
from controlplane.policies.placement.grid import Grid, ModelRow
from controlplane.policies.placement.highs import Floats, run_program


def region_bound(
    grid: Grid, region: int, token: Floats, *, gap_abs: float, nodes_max: int, should_stop: Callable[[], bool]
) -> float:
    """What the region costs per hour at least, less what it serves at these prices and what stopping all of it costs.

    Args:
        grid: the problem.
        region: its number.
        token: price per token/s of each model, [I].
        gap_abs: distance per hour to the region's best that ends the search.
        nodes_max: of branch and bound.
        should_stop: asked now and then; True ends the search.
    """
    models, left_out = [], 0.0
    for model, price in zip(grid.models, token.tolist(), strict=True):
        endpoint = model.endpoints[region]
        most = sum(cell.most * cell.profile.tokens_per_s for cell in endpoint.cells)
        peak = max(most, endpoint.busiest) if price else 0.0
        left_out += price * peak + grid.move_price * sum(cell.present for cell in endpoint.cells)
        left_out += grid.move_price * sum(option.before for option in endpoint.options)
        models.append(ModelRow(name=model.name, peak=peak, price=price, endpoints=(endpoint,)))
    here = [model.endpoints[0] for model in models]
    part = Grid(
        models=tuple(models),
        places=tuple(row for row in grid.places if row.place.region == here[0].endpoint.region),
        cells=tuple(cell for endpoint in here for cell in endpoint.cells),
        options=tuple(option for endpoint in here for option in endpoint.options),
        move_price=grid.move_price,
        fill=grid.fill,
    )
    problem = Program(part).highs
    run_program(problem, should_stop, mip_abs_gap=gap_abs, mip_max_nodes=nodes_max)
    return float(problem.getInfo().mip_dual_bound) - left_out
