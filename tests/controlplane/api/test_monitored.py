"""What boards and alerts ask for is what a running gateway and a running node really export, label by label."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from controlplane.store.terms import current_term
from ops.deploy.boards.all import BOARDS
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import World
from tests.dataplane.replay_node import KEY, Node, instance, running_node
from tests.ops.deploy.exported import AGENT, GATEWAY, TARGET_LABELS, exported
from tests.ops.deploy.promql import metrics_of
from tests.ops.deploy.test_alerts import RULES


@contextlib.asynccontextmanager
async def monitored(world: World) -> AsyncIterator[tuple[Gateway, Node]]:
    """A gateway that has answered and refused a request, the node that answered, a queue and a plan."""
    async with running_node() as node:
        url = str(node.client.base_url).rstrip("/")
        world.join("n0", url=url)
        held = world.place("n0")
        await node.hold(1, instance(held))
        world.report("n0", held, region="us-east", url=url)
        world.add_batch(lines=3)
        world.in_force((("tide", "us-east", 1),))
        with world.database.transaction() as session:
            current_term(session)  # as the first heartbeat begins it
        with running_gateway(world, node_key=SecretStr(KEY)) as gateway:
            await asyncio.to_thread(gateway.chat, max_tokens=3)
            await asyncio.to_thread(gateway.chat, 404, model="nobody")
            yield gateway, node


@pytest.fixture
def scraped(world: World) -> dict[str, str]:
    """`/metrics` of both, by job."""

    async def run() -> dict[str, str]:
        async with monitored(world) as (gateway, node):
            of_gateway = ""
            while "tidepool_plan_in_force" not in of_gateway:  # a busy machine may need a second try
                of_gateway = (await asyncio.to_thread(gateway.http.get, "/metrics")).text
            return {GATEWAY: of_gateway, AGENT: (await node.client.get("/metrics")).text}

    return asyncio.run(run())


def _asked() -> Iterator[str]:
    """Every metric that a board or an alert asks for."""
    for expr in (expr for board in BOARDS for panel in board.panels() for expr in panel.queries.values()):
        yield from metrics_of(expr)
    for rule in RULES:
        yield from metrics_of(rule["expr"])


def test_running_processes_export_what_boards_and_alerts_ask_for(scraped: dict[str, str]) -> None:
    families = {
        family.name: family.type for text in scraped.values() for family in text_string_to_metric_families(text)
    }
    names = {
        f"{name}{suffix}"
        for name, kind in families.items()
        for suffix in {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(kind, ("",))
    }
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    asked = set(_asked()) - recorded - {"up", "ALERTS"}
    assert len(asked) > 60
    assert asked - names == set()


def test_running_processes_have_the_labels_that_are_declared(scraped: dict[str, str]) -> None:
    seen = 0
    for job, text in scraped.items():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith("_created") or "Deprecated" in family.documentation:
                    continue
                declared = exported()[sample.name]
                own = declared.labels - TARGET_LABELS[job] | (set(sample.labels) & {"region", "instance"})
                assert set(sample.labels) == own, sample.name
                seen += 1
    assert seen > 100


def test_an_expression_is_read_to_its_last_metric() -> None:
    assert list(metrics_of("max(a) / on (x) sum by (x) (rate(b_total[5m])) or (c offset 5m)")) == ["a", "b_total", "c"]
