"""A node that starts says what its instances wait for, and loads them in the order it was given."""

import os
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from dataplane.agent.metrics import agent_registry
from dataplane.checkpoints.local import read_ahead
from tests.dataplane.replay_node import Node, desired, instance, running_node
from tests.event_loop import asynchronous


def waits(node: Node) -> dict[str, str | None]:
    return {report.instance_id: report.waits_for for report in node.agent.reports()}


@asynchronous
async def test_it_says_what_it_waits_for_and_how_long_the_worker_took() -> None:
    async with running_node() as node:
        node.agent.apply(desired(1, instance()))
        assert waits(node) == {"i1": "the worker process is starting"}
        await node.until(lambda: node.states() == {"i1": "ready"})
        assert waits(node) == {"i1": None}
        assert node.agent.workers[0].worker_start_s > 0
        line = next(
            line
            for line in generate_latest(agent_registry(node.agent)).decode().splitlines()
            if line.startswith("tidepool_worker_start_seconds{")
        )
        assert float(line.rsplit(" ", 1)[1]) == node.agent.workers[0].worker_start_s


@asynchronous
async def test_instances_are_loaded_in_the_order_given() -> None:
    """The control plane puts those first that have most demand."""
    order = [f"i{number}" for number in (3, 1, 4, 2)]
    async with running_node() as node:
        with capture_logs() as logs:
            node.agent.apply(desired(1, *(instance(name, name=f"m-{name}") for name in order)))
            await node.until(lambda: set(node.states().values()) == {"ready"})
        assert [line["instance"] for line in logs if line["event"] == "instance loaded"] == order


def test_checkpoints_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, start, length, _advice: asked.append((start, length)))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "config.json").write_text("{}")
    read_ahead(tmp_path)
    assert asked == [(0, 0)], "the whole file of weights, and nothing else"
    read_ahead(tmp_path / "missing")
