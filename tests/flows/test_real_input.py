"""The plan flow on real traffic: the SageServe week and the Azure coding week are imported, forecast, planned, scaled
to, and served from.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from forecasts.importers import read_azure_week, read_sageserve_week
from forecasts.models.forecasters import FORECASTERS
from forecasts.selection.combination import COMBINATION
from forecasts.series import DemandRow
from ops.client.api import Api, CommandError
from ops.local.sample_fleet import live_instances
from tests.flows.conftest import StackMaker, admin_of, client_of, register, wait_ready
from tests.flows.waiting import wait_until

DATA = Path(os.environ.get("TIDEPOOL_DATA", Path(__file__).parents[3] / "shared" / "data"))
SAGESERVE = DATA / "sageserve" / "nov2024_week_prompt_tokens_per_min.csv.gz"
AZURE = DATA / "azure" / "azure2024_week_requests_10s_Coding.csv.gz"
SHARE = {"us-east": 0.5, "us-central": 0.2, "us-west": 0.3}
BUSY_HOUR_S = (3 * 24 + 15) * 3600  # Thursday, 15:00, after the first minute
SERIES = 9  # three models in three regions
TARGET_TOKENS_PER_S = 12_000.0  # of the busiest minute, so that the peaks fit the small fleet

pytestmark = pytest.mark.skipif(not SAGESERVE.exists(), reason=f"no public traces at {DATA} (set TIDEPOOL_DATA)")


def _spread(rows: list[DemandRow], model: str) -> list[str]:
    """CSV lines of one model's week, scaled to the small fleet and shared over three regions. Starts at minute 0."""
    known = [row for row in rows if row.tokens_per_s is not None]
    scale = TARGET_TOKENS_PER_S / max(row.tokens_per_s or 0.0 for row in known)
    first_s = min(row.start_s for row in known)
    return [
        f"{int(row.start_s - first_s) + 1_731_283_200},{region},{model},{(row.tokens_per_s or 0.0) * scale * share:.3f}"
        for row in known
        for region, share in SHARE.items()
        if row.start_s - first_s < 7 * 86_400
    ]


def _import_weeks(admin: Api) -> int:
    """Imports both weeks and registers their models; returns a moment to plan at."""
    sageserve = list(read_sageserve_week(SAGESERVE))
    models = sorted({row.model for row in sageserve})
    lines = ["start_s,region,model,tokens_per_s"]
    for name in models:
        lines += _spread([row for row in sageserve if row.model == name], f"sageserve-{name.lower()}")
    lines += _spread(list(read_azure_week(AZURE)), "azure-coding")
    register(admin, (*(f"sageserve-{name.lower()}" for name in models), "azure-coding"))
    answer = admin.send("POST", "/admin/demand", content="\n".join(lines) + "\n", headers={"Content-Type": "text/csv"})
    assert answer["series"] == SERIES
    assert answer["rows"] > 80_000
    return int(answer["first_s"]) + BUSY_HOUR_S


@pytest.mark.slow
def test_real_weeks_are_forecast_planned_scaled_and_served(make_stack: StackMaker, tmp_path: Path) -> None:
    by_hand = {"TIDEPOOL_PLAN_APPROVAL": "always"}  # the schedule's plans, which know of no demand today, wait
    with (
        make_stack(tmp_path, environment=by_hand) as stack,
        client_of(stack) as client,
        admin_of(stack) as admin,
    ):
        for region in SHARE:
            admin.put(f"/admin/regions/{region}", {})
        origin_s = _import_weeks(admin)
        wait_ready(admin, SERIES)

        assert admin.post("/admin/forecasts/run", {"origin_s": origin_s}) == {"origin_s": origin_s}
        read = lambda: admin.get("/admin/forecasts", origin_s=origin_s)["data"]  # noqa: E731
        wait_until(lambda: len(read()) == SERIES, "every series forecast", 480.0)
        forecasts = read()
        assert {f["forecaster"] for f in forecasts} <= {COMBINATION, *FORECASTERS}
        assert all(0 < f["peak_q50"] <= f["peak_upper"] * 1.001 for f in forecasts)
        assert all(f["reason"] and len(f["path"]) == 12 for f in forecasts)

        dry = admin.post("/admin/plans", {"dry_run": True, "origin_s": origin_s})
        assert [plan for plan in admin.get("/admin/plans")["data"] if plan["origin"] != "schedule"] == []
        draft = admin.post("/admin/plans", {"origin_s": origin_s})
        assert [e["after"] for e in dry["entries"]] == [e["after"] for e in draft["entries"]]
        assert draft["plan"]["status"] == "optimal"
        planned = {(e["model"], e["region"]): e["after"] for e in draft["entries"] if e["after"]}
        assert max(planned.values()) > 1
        admin.post(f"/admin/plans/{draft['plan']['id']}/apply", {"index": draft["index"]})

        def follows() -> bool:
            rows = [row for row in live_instances(admin) if row["desired"] == "running" and row["state"] == "ready"]
            return Counter((row["model"], row["region"]) for row in rows) == planned

        wait_until(follows, "the agents hold the plan")
        for model, region in sorted(planned):
            raw = client.chat.completions.with_raw_response.create(
                model=model,
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=4,
                extra_headers={"x-tidepool-region": region},
            )
            assert raw.headers["x-tidepool-region"] == region
        with pytest.raises(CommandError, match="409"):
            admin.post(f"/admin/plans/{admin.post('/admin/plans', {})['plan']['id']}/apply", {"index": 0})
