"""A real Prometheus scrapes a gateway and a node by our configuration, and evaluates all rules and all boards' queries.

Parsers cannot tell what fails in evaluation only, such as series that match several others.
"""

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml

from ops.deploy.boards.all import BOARDS
from ops.deploy.boards.board import Panel
from ops.local.ports import free_port
from tests.controlplane.api.test_monitored import monitored
from tests.controlplane.world import PATIENCE_S, World, until
from tests.ops.deploy.exported import AGENT, GATEWAY
from tests.ops.deploy.promql import filled
from tests.ops.deploy.test_alerts import ROOT, RULES, SCRAPED

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus here (`make test-alerts` installs it on Debian)"
)
_RATE_INTERVAL = "1m"
QUIET = {
    "overview: Alerts",
    "planning: Cost and objective an hour",
    "planning: Error of the last day",
    "planning: Gap",
    "planning: Instances ready",
    "planning: Instances without a place",
    "planning: Late loops",
    "planning: Time since a loop's last success",
    "planning: Time between tokens, beside its profile",
    "pools: KV memory by state",
    "pools: Weight layers lent to KV",
    "queue: Dispatcher's last success",
    "queue: Flex requests refused",
    "serving: Instances without a place",
    "serving: Objectives missed, by which",
    "serving: Outcomes other than ok",
    "serving: Refusals",
    "serving: Streams continued on another instance",
}
"""Panels of what has not happened here."""


@contextlib.contextmanager
def running_prometheus(folder: Path, targets: dict[str, str]) -> Iterator[httpx.Client]:
    """A Prometheus with our example of a configuration, whose jobs have these targets and scrape once a second."""
    config = SCRAPED | {"rule_files": [str(ROOT / "ops/deploy/alerts/*.yaml")], "alerting": {}}
    config["global"] = SCRAPED["global"] | {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"] = [
        {
            "job_name": job["job_name"],
            "static_configs": [{**job["static_configs"][0], "targets": [targets[job["job_name"]]]}],
        }
        for job in SCRAPED["scrape_configs"]
    ]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_S) as client:
            yield client
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


def evaluated(prometheus: httpx.Client, expr: str) -> list[Any]:
    answer = prometheus.post("/api/v1/query", data={"query": expr}).json()
    assert answer["status"] == "success", f"{expr}: {answer.get('error')}"
    return answer["data"]["result"]


def shown(prometheus: httpx.Client, panel: Panel) -> bool:
    """Whether any query of a panel has a result; all are asked."""
    results = [evaluated(prometheus, filled(expr, rate_interval=_RATE_INTERVAL)) for expr in panel.queries.values()]
    return any(results)


def check(prometheus: httpx.Client) -> None:
    def has_scraped() -> bool:
        with contextlib.suppress(httpx.TransportError):
            ready = prometheus.get("/-/ready").status_code == 200
            return ready and len(evaluated(prometheus, "count_over_time((up == 1)[1m:1s]) > 3")) == 2
        return False

    until(has_scraped)
    rules = [rule for group in prometheus.get("/api/v1/rules").json()["data"]["groups"] for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")} == {}
    for rule in RULES:
        evaluated(prometheus, rule["expr"])
    until(lambda: empty_panels(prometheus) <= QUIET)  # a slow scrape lacks the system's metrics for once


def empty_panels(prometheus: httpx.Client) -> set[str]:
    return {
        f"{board.name}: {panel.title}" for board in BOARDS for panel in board.panels() if not shown(prometheus, panel)
    }


def test_a_real_prometheus_evaluates_every_rule_and_every_panel(world: World, tmp_path: Path) -> None:
    async def run() -> None:
        async with monitored(world) as (gateway, node):
            targets = {GATEWAY: gateway.url, AGENT: str(node.client.base_url)}
            hosts = {job: httpx.URL(url).netloc.decode() for job, url in targets.items()}
            with running_prometheus(tmp_path, hosts) as prometheus:
                await asyncio.to_thread(check, prometheus)

    asyncio.run(run())
