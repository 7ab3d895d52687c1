"""A node that starts says what its instances wait for, and loads them in the order it was given."""

import os
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from dataplane.agent import hosted_instances
from dataplane.agent.metrics import agent_registry
from dataplane.checkpoints.local import local_checkpoint, read_ahead
from dataplane.protocol.errors import ModelLoadError
from tests.dataplane.replay_node import Node, desired, instance, running_node, settings
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


@pytest.mark.parametrize("what", ["worker", "load"])
@asynchronous
async def test_how_long_a_load_took_counts_from_its_own_beginning(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from when the instance was first wanted, hours ago, if its worker died or its load failed since."""
    broken = what == "load"

    def located(*given: Any, **more: Any) -> Path:
        if broken:
            raise ModelLoadError("not there yet")
        return local_checkpoint(*given, **more)

    monkeypatch.setattr(hosted_instances, "local_checkpoint", located)
    async with running_node(settings(load_retry_s=0.01)) as node:
        node.agent.apply(desired(1, instance()))
        await node.until(lambda: node.states() == {"i1": "failed" if broken else "ready"})
        [worker] = node.agent.workers
        hosted = worker.hosted.get("i1")
        assert hosted is not None
        hosted.wanted_s -= 10_000.0
        with capture_logs() as logs:
            if broken:
                broken = False
            else:
                killed = worker.pid
                assert killed is not None
                os.kill(killed, SIGKILL)
                await node.until(lambda: worker.pid not in (None, killed))
            await node.until(lambda: node.states() == {"i1": "ready"})
        [line] = [line for line in logs if line["event"] == "instance loaded"]
        assert 0 <= line["start_s"] < 10_000


def test_checkpoints_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, start, length, _advice: asked.append((start, length)))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "config.json").write_text("{}")
    read_ahead(tmp_path)
    assert asked == [(0, 0)], "the whole file of weights, and nothing else"
    read_ahead(tmp_path / "missing")
