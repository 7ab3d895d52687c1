"""The report and the comparison: self-contained, complete, and without what a run does not have."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from ops.cli.main import app
from ops.client.api import CommandError
from ops.simulator.results.compare import Line, compare, compare_page
from ops.simulator.results.report import report
from ops.simulator.results.report_figures import attainment
from ops.simulator.results.results import Result

STEPS = 90
MODELS, TIERS = ("large", "small <b>"), ("IW-F", "NIW")
QUANTILES = {"p50": 0.2, "p95": 0.6, "p99": 1.4}
EMPTY = {"gpus": {}, "switches": [], "endpoints": [], "pools": [], "queues": [], "tiers": []}


def row(model: str | None, tier: str, attained: float) -> dict[str, Any]:
    return {
        "model": model,
        "tier": tier,
        "requests": 10,
        "failed": 1,
        "service_attainment": attained,
        "token_attainment": attained - 0.1,
        "ttft_violations": 0.05,
        "input_tokens": 9,
        "output_tokens": 9,
        "ttft_s": QUANTILES,
        "tbt_mean_s": None,
        "service_s": QUANTILES,
    }


def endpoint(model: str, region: str) -> dict[str, Any]:
    known = [None if step < 60 else float(step) for step in range(STEPS)]
    counts = [float(step // 60) for step in range(STEPS)]
    return {
        "model": model,
        "region": region,
        "demand": [100.0 + step for step in range(STEPS)],
        "forecast": known,
        "planned": [None if value is None else 2 for value in known],
        "serving": {"mixed": counts},
        "pooled": counts,
        "warming": counts,
        "draining": counts,
        "spot": counts,
        "utilization": known,
    }


def result(**changes: Any) -> Result:
    series: dict[str, Any] = {
        "gpus": {"serving": [4.0] * STEPS, "pooled": [2.0] * STEPS, "spot": [1.0] * STEPS},
        "switches": [9] * STEPS,
        "endpoints": [endpoint(model, "east") for model in MODELS],
        "pools": [{"region": "east", "gpu_type": "H800", "gpus": [2.0] * STEPS, "planned": [None] + [2] * (STEPS - 1)}],
        "queues": [{"model": "large", "waiting": list(range(STEPS)), "age_s": [60.0 * n for n in range(STEPS)]}],
        "tiers": [{"tier": tier, "ended": [5] * STEPS, "ttft_p95_s": [None, *[0.5] * (STEPS - 1)]} for tier in TIERS],
    }
    totals: dict[str, Any] = {
        "gpu_hours": {"serving": 60.0, "pooled": 30.0, "warming": 10.0, "spot": 5.0},
        "cost": 250.0,
        "gpu_types": {
            "H20": {"gpu_hours": {"serving": 60.0, "spot": 5.0}, "cost": 50.0},
            "H800": {"gpu_hours": {"serving": 30.0, "warming": 10.0}, "cost": 200.0},
        },
        "switches": 3,
        "instance_hours": {model: {"serving": 45.0, "warming": 5.0} for model in MODELS},
        "starts": {"present": 2, "local": 4},
        "scale_outs": 4,
        "scale_ins": 3,
        "node_failures": 1,
        "interrupted": 2,
        "unplaced": 0,
    }
    document: dict[str, Any] = {
        "scenario": "a & b",
        "seed": 1,
        "strategy": "lt-i",
        "event_log_hash": "ab" * 16,
        "events": 9,
        "requests": 44,
        "failures": {"no instance": 4},
        "simulated_s": 60.0 * STEPS,
        "seconds": 1.0,
        "requests_per_s": 44.0,
        "requests_in_system_mean": 1.5,
        "slots": 4,
        "slot_hours": 12.0,
        "busy_share": 0.5,
        "service_attainment": 0.97,
        "token_attainment": 0.9,
        "rows": [row(model, tier, 0.95) for model in MODELS for tier in TIERS],
        "tiers": [row(None, tier, 0.95) for tier in TIERS],
        "totals": totals,
        "series": {"start_s": 3600.0, "step_s": 60.0, **series},
    }
    return Result.model_validate(document | changes)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.loaded: list[str] = []
        self._within = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._within = tag
        names = {"src", "href", "xlink:href"}
        self.loaded += [value for name, value in attrs if name in names and value and value[0] != "#"]

    def handle_data(self, data: str) -> None:
        if self._within == "h2":
            self.headings.append(data)
        self._within = ""


def read(html: str) -> _Page:
    page = _Page()
    page.feed(html)
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(svg)
    return page


@pytest.mark.slow
def test_a_whole_report_loads_nothing_and_shows_everything() -> None:
    html = report(result())
    page = read(html)
    assert page.headings == [
        *("Attainment", "Instances against demand", "Pools", "Utilization", "Time to the first token"),
        *("Deferred requests", "Where instance-hours went", "GPU types", "Requests", "Totals"),
    ]
    assert not [url for url in page.loaded if not url.startswith("data:")]
    assert "a &amp; b" in html
    assert "small <b>" not in html
    for words in (
        "$200.00",
        "80.0%",
        "97.00%",
        "$250",
        "10.0%",
        "of GPU hours warming",
        "30.0%",
        "of GPU hours in pools",
        "ab" * 16,
    ):
        assert words in html


def test_a_figure_is_the_same_for_the_same_result() -> None:
    assert attainment(result()) == attainment(result())


def test_what_a_run_does_not_have_is_left_out() -> None:
    bare = result(
        series={"start_s": 0.0, "step_s": 60.0, **EMPTY},
        strategy=None,
        totals=result()
        .totals.model_copy(update={"instance_hours": {}, "gpu_hours": {}, "gpu_types": {}, "cost": 0.0})
        .model_dump(),
    )
    assert read(report(bare)).headings == ["Attainment", "Requests", "Totals"]
    nothing = bare.model_copy(update={"rows": [], "tiers": []})
    assert read(report(nothing)).headings == ["Requests", "Totals"]


def test_a_comparison_tells_better_from_worse() -> None:
    better: Callable[..., Result] = lambda **totals: result(  # noqa: E731
        totals=result().totals.model_copy(update=totals).model_dump(), token_attainment=0.89
    )
    lines = {line.name: line for line in compare(result(), better(cost=200.0, switches=3, unplaced=0))}
    assert (lines["cost"].difference, lines["cost"].share, lines["cost"].verdict) == (-50.0, -0.2, "good")
    assert lines["cost"].texts() == ("250.00 $", "200.00 $", "-50.00 $", "-20.0%")
    assert lines["token attainment"].texts()[2:] == ("-1.00 pt", "")
    assert lines["token attainment"].verdict == "bad"
    assert lines["model switches"].verdict == ""
    assert (lines["GPU hours on H20"].a, lines["GPU hours on H800"].a) == (60.0, 40.0), "without what is lent out"
    assert (lines["cost of H800"].b, lines["cost of H800"].verdict) == (200.0, "")
    assert (lines["GPU hours pooled"].a, lines["GPU hours, all but spot"].a) == (30.0, 100.0)
    assert "asked for without room" not in lines, "nothing in both"
    assert "IW-F: TBT p95" not in lines, "known of neither"
    html = compare_page(("x", "y"), result(), better(cost=1.0))
    assert read(html).headings == ["Figures", "Attainment by tier", "Over time"]
    assert 'class="good"' in html


def test_figures_near_each_other_are_not_called_better() -> None:
    line = Line(part="all", name="x", unit="s", better="less", a=1.0, b=1.004)
    assert line.verdict == ""
    assert Line(part="all", name="x", unit="s", better="less", a=1.0, b=1.02).verdict == "bad"
    assert Line(part="all", name="x", unit="s", better="less", a=None, b=1.0).texts() == ("-", "1 s", "", "")


def test_the_commands(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(result().model_dump_json())
    b.write_text(result(requests=50).model_dump_json())
    shown = CliRunner().invoke(app, ["simulate", "compare", str(a), str(b), "--report", str(tmp_path / "c.html")])
    assert shown.exit_code == 0, shown.output
    assert "+6" in shown.output
    assert read((tmp_path / "c.html").read_text()).headings
    b.write_text("{}")
    refused = CliRunner().invoke(app, ["simulate", "compare", str(a), str(b)])
    assert isinstance(refused.exception, CommandError)
    assert f"{b}: scenario: Field required" in str(refused.exception)
    nowhere = CliRunner().invoke(app, ["simulate", "compare", str(a), str(a), "--report", str(tmp_path / "no" / "c")])
    assert isinstance(nowhere.exception, CommandError)


def test_a_run_of_a_minute_is_drawn() -> None:
    short = result().model_dump()["series"]
    for part in ("endpoints", "pools", "queues", "tiers"):
        for one in short[part]:
            one.update({key: value[:1] for key, value in one.items() if isinstance(value, list)})
    short["gpus"] = {state: column[:1] for state, column in short["gpus"].items()}
    short["switches"] = short["switches"][:1]
    for one in short["endpoints"]:
        one["serving"] = {"mixed": one["serving"]["mixed"][:1]}
    read(report(result(series=short)))
