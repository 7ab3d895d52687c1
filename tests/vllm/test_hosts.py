"""A slot whose GPUs are of two hosts, a follower of its own process group being the second: the same tokens as one
host's, a follower that dies under a stream and comes back, one that is absent, and an unload that ends all ranks.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from dataplane.agent.settings import AgentSettings, WorkerSettings
from dataplane.protocol.messages import DesiredInstance, Finished, Generate, Sampling
from tests.dataplane.agent.test_torch_node import checkpoint, torch_settings
from tests.dataplane.replay_node import KEY, Node, desired, generate, running_node
from tests.dataplane.streams import read, token_ids
from tests.vllm.conftest import HEAD_DIM

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

pytestmark = [pytest.mark.timeout(3600), pytest.mark.slow]

MAX_TOKENS = 230


@contextlib.contextmanager
def follower(node: Node, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running follower of the node's slot, with a folder of its own. In the end it and its ranks are gone."""
    environment = dict(os.environ) | {"TIDEPOOL_AGENT_NODE_KEY": KEY, "TIDEPOOL_AGENT_CHECKPOINTS_DIR": str(home)}
    command = ["node", "follow", "--head", str(node.client.base_url), "--rank", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ops.cli.main", *command], env=environment, process_group=0, stdin=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def ranks() -> list[psutil.Process]:
    """The processes of vLLM's ranks below this one, of the head and of followers."""
    return [one for one in psutil.Process().children(recursive=True) if "VLLM::Worker" in _name(one)]


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def spanning() -> AgentSettings:
    slot = WorkerSettings(gpus=2, hosts=2, memory_bytes=2**26)
    given = {"slots": (slot,), "engine": "vllm", "load_retry_s": 3600.0}
    return torch_settings(1).model_copy(update=given)


def asked(request_id: str, temperature: float) -> Generate:
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=temperature, seed=5, ignore_eos=True)
    return generate(request_id, sampling=sampling)


async def answers(node: Node, name: str) -> list[list[int]]:
    streams = await asyncio.gather(*(read(node, asked(f"{name}-{heat}", heat)) for heat in (0.0, 0.8)))
    assert all(isinstance(events[-1], Finished) for events in streams), streams
    return [token_ids(events) for events in streams]


def test_two_hosts_run_a_model_together_and_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = checkpoint(tmp_path / "tide", head_dim=HEAD_DIM)
    held = DesiredInstance(instance_id="i1", slot=0, gpus=2, model=msgspec.structs.replace(spec, engine="vllm"))

    async def one_host() -> list[list[int]]:
        on_torch = DesiredInstance(instance_id="i1", slot=0, gpus=1, model=spec)
        async with running_node(torch_settings(1)) as node:
            await node.hold(1, on_torch)
            return await answers(node, "one")

    async def two_hosts(expected: list[list[int]]) -> None:
        async with running_node(spanning()) as node:
            (worker,) = node.agent.workers
            node.client.timeout = None  # a stream waits for the second follower
            with follower(node, tmp_path / "first") as first:
                await node.hold(1, held)
                assert len(ranks()) == 2
                assert await answers(node, "two") == expected

                tokens_before = worker.stats.tokens_total
                stream = asyncio.create_task(answers(node, "cut"))
                await node.until(lambda: worker.stats.tokens_total > tokens_before)
                first.send_signal(signal.SIGKILL)
                await node.until(lambda: node.states() == {"i1": "failed"})
            (report,) = node.agent.reports()
            assert report.error is not None
            assert "host 1 of slot 0 is missing: its follower has not reported for" in report.error
            await node.until(lambda: not ranks())
            with follower(node, tmp_path / "second"):
                assert await stream == expected
                assert node.states() == {"i1": "ready"}

                node.agent.apply(desired(2))
                await node.until(lambda: not ranks())
                await node.until(lambda: node.states() == {})

    monkeypatch.setattr("tests.event_loop.PATIENCE_S", 900.0)
    asyncio.run(two_hosts(asyncio.run(one_host())))
