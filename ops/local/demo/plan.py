"""The demo's last step: a week of demand, the forecast of the next hour, the placement, and agents that follow it."""

import time
from collections import Counter
from http import HTTPStatus
from pathlib import Path

from forecasts.synthetic import generate_demand
from ops.client.api import CommandError
from ops.client.plan import show_plan
from ops.local.demo.stage import Demo, DemoError, ask
from ops.local.sample_fleet import LONG_TAIL, POOL_REGION, REGIONS, live_instances, regions_of
from ops.local.tiny_models import TinyModel

DEMAND_DAYS = 7.0
DEMAND_SEED = 7
PEAK_TOKENS_PER_S = 9_000.0
TAIL_PEAK_TOKENS_PER_S = 1_000.0


def plan(demo: Demo, demand: Path | None) -> None:
    """Import a week of demand, forecast the next hour, solve the placement, apply it, and check that it is followed."""
    with demo.step("Plan", "a week of demand per minute -> forecast of the next hour -> placement -> instances"):
        text = _generated_demand(demo.models) if demand is None else demand.read_text()
        imported = demo.admin.send("POST", "/admin/demand", content=text, headers={"Content-Type": "text/csv"})
        demo.console.print(f"   imported {imported['rows']:,} minutes of demand in {imported['series']} series.")
        origin_s = imported["last_s"] + 60
        _forecast(demo, imported["series"], origin_s)
        while not _plan_once(demo, origin_s):
            demo.console.print("   the fleet changed meanwhile, by the schedule's own plan perhaps; planning again.")
        _follow(demo)


def _plan_once(demo: Demo, origin_s: float) -> bool:
    """Draft, show, apply; False if the fleet changed between the first and the last."""
    draft = demo.admin.post("/admin/plans", {"origin_s": origin_s})
    show_plan(draft)
    try:
        demo.admin.post(f"/admin/plans/{draft['plan']['id']}/apply", {"index": draft["index"]})
    except CommandError as error:
        if error.status == HTTPStatus.CONFLICT:
            return False
        raise
    return True


def _plan_in_force(demo: Demo) -> dict[tuple[str, str], int]:
    """Instances by (model, region), as the plan in force has them."""
    plans = demo.admin.get("/admin/plans")["data"]
    applied = next(plan["id"] for plan in plans if plan["state"] == "applied")
    entries = demo.admin.get(f"/admin/plans/{applied}")["entries"]
    return {(entry["model"], entry["region"]): entry["after"] for entry in entries if entry["after"]}


def _generated_demand(models: list[TinyModel]) -> str:
    """Demand where each model is offered: much for a few models everywhere, little for the long tail in its region."""
    start_s = int(time.time()) // 60 * 60 - DEMAND_DAYS * 86_400
    names = [model.name for model in models]
    rows = [
        row
        for regions, offered, peak_tokens_per_s in (
            (REGIONS, [name for name in names if name not in LONG_TAIL], PEAK_TOKENS_PER_S),
            ((POOL_REGION,), [name for name in names if name in LONG_TAIL], TAIL_PEAK_TOKENS_PER_S),
        )
        for row in generate_demand(
            [region.name for region in regions],
            offered,
            DEMAND_DAYS,
            DEMAND_SEED,
            start_s=start_s,
            peak_tokens_per_s=peak_tokens_per_s,
            utc_offsets_h={region.name: region.utc_offset_h for region in regions},
        )
    ]
    lines = ("" if r.tokens_per_s is None else f"{r.tokens_per_s:.2f}" for r in rows)
    body = "".join(f"{int(r.start_s)},{r.region},{r.model},{value}\n" for r, value in zip(rows, lines, strict=True))
    return "start_s,region,model,tokens_per_s\n" + body


def _forecast(demo: Demo, series: int, origin_s: int) -> None:
    demo.admin.post("/admin/forecasts/run", {"origin_s": origin_s})
    demo.wait("forecasts", series, lambda: len(demo.admin.get("/admin/forecasts", origin_s=origin_s)["data"]))
    forecasts = demo.admin.get("/admin/forecasts", origin_s=origin_s)["data"]
    chosen = Counter(forecast["forecaster"] for forecast in forecasts)
    summary = ", ".join(f"{name} for {count}" for name, count in chosen.most_common())
    peak = sum(forecast["peak_upper"] for forecast in forecasts)
    demo.console.print(f"   chosen by backtest: {summary}; peaks of the next hour add up to {peak:,.0f} tokens/s.")


def _follow(demo: Demo) -> None:
    """Wait until the agents run the instances of the plan in force, then check that requests are routed there."""
    cells = [(model.name, region.name) for model in demo.models for region in regions_of(model.name)]

    def matching() -> int:
        planned, live = _plan_in_force(demo), live_instances(demo.admin)
        if any(row["desired"] == "draining" for row in live):
            return 0
        ready = Counter((row["model"], row["region"]) for row in live if row["state"] == "ready")
        return sum(ready[cell] == planned.get(cell, 0) for cell in cells)

    demo.wait("endpoints as planned", len(cells), matching)
    planned = _plan_in_force(demo)
    served: Counter[str] = Counter()
    for model, region in sorted(planned):
        answer = ask(demo.client, model, region)
        if (model, answer.region) not in planned:
            raise DemoError(f"{model} was served in {answer.region}, where the plan has none")
        served[answer.region] += 1
    summary = ", ".join(f"{count} in {region}" for region, count in sorted(served.items()))
    demo.console.print(f"   the agents hold the plan; the next requests were served {summary}.")
