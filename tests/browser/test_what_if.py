"""What-if runs: started from the form, simulated by the worker, and two of them compared."""

import re
from typing import Any

from ops.client.api import Api
from tests.browser.conftest import HOSTILE, PATIENCE_MS, PICTURES, SignIn, expect, serious_faults
from tests.browser.fleet import import_demand

HOURS = 24
INK = """(figure) => {
    const canvas = figure.querySelector("canvas");
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set();
    for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200) colours.add(data.slice(at, at + 3).join());
    return colours.size;
}"""
"""Of how many colours a chart is."""

BARS = "progress[aria-label^='Progress of ']"
SIMULATES = f'() => [...document.querySelectorAll("{BARS}")].some((each) => each.value > 0)'


def _start(page: Any, name: str, *, demand: str = "") -> None:
    page.get_by_role("button", name="New run …").click()
    dialog = page.get_by_role("dialog", name="Simulate the fleet with changes")
    dialog.get_by_label("Name").fill(name)
    dialog.get_by_label("Hours of demand").fill(str(HOURS))
    if demand:
        dialog.get_by_role("button", name="+ Demand").click()
        dialog.get_by_role("group", name="Demand").get_by_label("Times as much demand").fill(demand)
    dialog.get_by_role("button", name="Start the run").click()
    dialog.wait_for(state="hidden")


def _figures(page: Any, name: str) -> list[str]:
    """The cells of a line of the totals."""
    cell = page.get_by_role("cell", name=name, exact=True).first
    return list(page.get_by_role("row").filter(has=cell).first.get_by_role("cell").all_inner_texts())


def _number(words: str) -> int:
    return int(re.sub(r"\D", "", words))


def _charts_are_drawn(page: Any) -> None:
    for label in ("GPUs in use", "Time to the first token, 95th percentile, by tier"):
        chart = page.get_by_role("figure", name=label)
        chart.locator("canvas").wait_for()
        assert chart.evaluate(INK) > 2, f"axes and lines of {label}"


def test_runs_are_started_followed_and_compared(signed_in: SignIn, admin: Api) -> None:
    import_demand(admin, {("us-east", "tide"): 1500.0, ("us-west", "tide"): 800.0}, hours=HOURS)
    person = signed_in("operator")
    page = person.page
    whole, half = f"whole {HOSTILE}", "half"
    person.open("#/what-if")
    _start(page, whole)
    _start(page, half, demand="0.5")
    rows = page.get_by_role("table", name="What-if runs").get_by_role("row")
    page.wait_for_function(SIMULATES)
    for name in (whole, half):
        expect(rows.filter(has_text=name)).to_contain_text("completed", timeout=4 * PATIENCE_MS)

    runs = {run["name"]: admin.get(f"/admin/what-if/{run['id']}") for run in admin.pages("/admin/what-if")["data"]}
    requests = {name: runs[name]["result"]["requests"] for name in (whole, half)}
    assert 0 < requests[half] < requests[whole]
    rows.filter(has_text=whole).get_by_role("link").click()
    page.get_by_role("heading", name=whole, level=1).wait_for()
    assert _number(_figures(page, "Requests")[1]) == requests[whole]
    _charts_are_drawn(page)
    assert serious_faults(page) == []

    page.go_back()
    for name in (whole, half):
        page.get_by_role("checkbox", name=f"Compare {name}").check()
    page.get_by_role("link", name="Compare the two").click()
    page.get_by_role("heading", name="Two what-if runs").wait_for()
    page.get_by_role("columnheader", name="Difference").first.wait_for()
    _, *shown, difference = _figures(page, "Requests")
    assert list(map(_number, shown)) == [requests[whole], requests[half]]
    assert _number(difference) == requests[whole] - requests[half]
    _charts_are_drawn(page)
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / "what-if-two.png", full_page=True)
    assert page.evaluate("() => window.pwned") is None
