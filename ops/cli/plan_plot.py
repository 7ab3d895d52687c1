"""`plan plot`: a picture of a plan, from data of the API."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.ids import PlanId, whole_id
from ops.client.api import Api, CommandError, connected, path_to
from ops.client.screen import AsJson, print_answer, time_text

if TYPE_CHECKING:
    from ops.plots.panels import Curve
    from ops.plots.plan_plot import Band, PlanPanel

HOUR_S = 3600
BUCKET_S = 300
PANELS = 6
Endpoint = tuple[str, str]


@examples("tidepool plan plot plan_0190f3c2a7b57c1e8d2f4b6a8c0e1f23 plan.png --model llama-8b")
def plot_plan(
    context: typer.Context,
    plan_id: PlanId,
    out: Annotated[Path, typer.Argument(help="PNG, SVG or PDF, by its ending.")],
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    region: Annotated[str | None, typer.Option(help="Only this region.")] = None,
    hours: Annotated[int, typer.Option(min=1, max=168, help="Hours of history.")] = 24,
    as_json: AsJson = False,
) -> None:
    """Draw a plan: demand before it, its forecast, the capacity that it places, and the actual demand.

    \b
    The busiest endpoints have one panel each, below a panel of their sum.
    """
    from ops.plots.panels import PlotError, check_path
    from ops.plots.plan_plot import draw_plan, total_panel

    try:
        check_path(out)
        with connected(context) as api:
            plan_id = whole_id(api, "plan", plan_id)
            answer = api.get(path_to("/admin/plans", plan_id))
            panels, endpoints, quantile = plan_panels(api, answer, model=model, region=region, hours=hours)
        if not panels:
            raise CommandError(f"plan {plan_id} has no endpoint of that model and region")
        if len(panels) > 1:
            panels = [total_panel(panels, f"{len(panels)} endpoints added up"), *panels]
        title = f"Plan {plan_id} for {time_text(answer['plan']['window_start_s'])}"
        draw_plan(panels, out, title=title, quantile=quantile)
    except PlotError as error:
        raise CommandError(str(error)) from error
    print_answer(
        {"file": str(out), "drawn": len(panels), "endpoints": endpoints},
        f"{out}: {len(panels)} panels of {endpoints} endpoints",
        as_json=as_json,
    )


def plan_panels(
    api: Api, answer: Mapping[str, Any], *, model: str | None, region: str | None, hours: int
) -> "tuple[list[PlanPanel], int, float]":
    """Panels of the busiest endpoints, how many endpoints there are, and the quantile of the forecast."""
    from ops.plots.plan_plot import PlanPanel

    plan = answer["plan"]
    inputs = _inputs_of(api, plan["id"])
    origin_s = plan["window_start_s"] if inputs is None else inputs["forecasts"]["origin_s"]
    expected = {} if inputs is None else {_endpoint(each): each for each in inputs["forecasts"]["series"]}
    rows = {} if inputs is None else {_endpoint(r): r for r in api.get("/admin/forecasts", origin_s=origin_s)["data"]}
    rates = {(each["model"], each["gpu_type"]): each["tokens_per_s"] for each in api.pages("/admin/profiles")["data"]}
    for each in (inputs or {}).get("corrections") or []:
        rates[each["model"], each["gpu_type"]] = each["tokens_per_s"]
    cells: dict[Endpoint, list[Any]] = {}
    for entry in answer["entries"]:
        cells.setdefault(_endpoint(entry), []).append(entry)
    wanted = [
        each
        for each in sorted({*cells, *expected})
        if (model is None or each[0] == model) and (region is None or each[1] == region)
    ]
    wanted.sort(key=lambda each: -expected[each]["peak_upper"] if each in expected else 0.0)
    panels = []
    for endpoint in wanted[:PANELS]:
        demand = api.get(
            "/admin/demand",
            model=endpoint[0],
            region=endpoint[1],
            since_s=max(0, origin_s - hours * HOUR_S),
            until_s=plan["window_start_s"] + HOUR_S,
        )
        panels.append(
            PlanPanel(
                title=f"{endpoint[0]} in {endpoint[1]}",
                origin_s=origin_s,
                history=_curve(demand, demand["since_s"], origin_s),
                actual=_curve(demand, origin_s, demand["until_s"]),
                forecast=_bands(expected.get(endpoint), rows.get(endpoint), origin_s),
                capacity=_capacity(cells.get(endpoint, []), rates, origin_s, plan["window_start_s"]),
                note=(expected.get(endpoint) or {}).get("stand_in") or "",
            )
        )
    return panels, len(wanted), 0.9 if inputs is None else inputs["forecasts"]["quantile"]


def _inputs_of(api: Api, plan_id: str) -> Any:
    """None for a plan that no solver made."""
    try:
        return api.get(path_to("/admin/plans", plan_id, "inputs"))
    except CommandError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return None
        raise


def _bands(expected: Any, row: Any, origin_s: int) -> "list[Band]":
    """The forecast window by window; of a fallback forecast, its one peak for the whole hour."""
    from ops.plots.plan_plot import Band

    if expected is None:
        return []
    upper = expected["peak_upper"]
    path = [upper] if row is None or expected["stand_in"] else row["path"]
    share = expected["peak_q50"] / upper if upper else 1.0
    width_s = HOUR_S / len(path)
    starts_s = (origin_s + width_s * at for at in range(len(path)))
    return [
        Band(start_s=start_s, end_s=start_s + width_s, q50=share * value, upper=value)
        for start_s, value in zip(starts_s, path, strict=True)
    ]


def _capacity(
    cells: Sequence[Mapping[str, Any]], rates: Mapping[tuple[str, str], float], origin_s: int, window_start_s: int
) -> Any:
    """What was placed until the plan's hour, and what the plan places in it."""
    from ops.plots.plan_plot import Capacity

    steps = [("before", origin_s - HOUR_S, window_start_s), ("after", window_start_s, window_start_s + HOUR_S)]
    return [
        Capacity(
            start_s=start_s,
            end_s=end_s,
            tokens_per_s=sum(cell[when] * rates.get((cell["model"], cell["gpu_type"]), 0.0) for cell in cells),
            instances=sum(cell[when] for cell in cells),
        )
        for when, start_s, end_s in steps
    ]


def _curve(demand: Mapping[str, Any], since_s: int, until_s: int) -> "Curve | None":
    """Five-minute means of the points in [since_s, until_s); a bucket without a point is a gap."""
    import numpy as np

    from ops.plots.panels import Curve

    points = [(p["start_s"], p["tokens_per_s"]) for p in demand["data"] if since_s <= p["start_s"] < until_s]
    if not points:
        return None
    places = np.array([(start_s - since_s) // BUCKET_S for start_s, _ in points])
    sums, counts = np.zeros(places.max() + 1), np.zeros(places.max() + 1)
    np.add.at(sums, places, [value for _, value in points])
    np.add.at(counts, places, 1)
    means = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
    return Curve(start_s=since_s + BUCKET_S * np.arange(len(means), dtype=float), tokens_per_s=means, bucket_s=BUCKET_S)


def _endpoint(row: Mapping[str, Any]) -> Endpoint:
    return row["model"], row["region"]
