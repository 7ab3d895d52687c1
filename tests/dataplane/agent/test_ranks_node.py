"""A node with a slot of two GPUs: a rank that dies takes its worker down and no other, and no token shows it."""

import asyncio
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dataplane.agent.settings import WorkerSettings
from dataplane.protocol.messages import DesiredInstance
from tests.dataplane.agent.test_torch_node import body, calm_tokens, checkpoint, torch_settings
from tests.dataplane.replay_node import desired, running_node
from tests.dataplane.streams import read, token_ids
from tests.event_loop import asynchronous

SLOTS = (WorkerSettings(gpus=2, ranks=2, memory_bytes=16 * 2**20), WorkerSettings(gpus=1, memory_bytes=8 * 2**20))
MODELS = {"tide": 0, "ebb": 1, "neap": 0}
"""The slot of each. The last one comes when the rank breaks."""


def other_rank(pid: int) -> int:
    """The one child of a process."""
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def kill(rank: int) -> None:
    os.kill(rank, signal.SIGKILL)


def fill_host(rank: int) -> None:
    """Let it map no further memory."""
    pages = int(Path(f"/proc/{rank}/statm").read_text().split()[0])
    size_bytes = pages * resource.getpagesize()
    resource.prlimit(rank, resource.RLIMIT_AS, (size_bytes, size_bytes))


@pytest.mark.slow
@pytest.mark.parametrize(("breaks", "mixed"), [(kill, False), (fill_host, True)])
@asynchronous
async def test_a_broken_rank_changes_no_token_and_no_other_worker(
    breaks: Callable[[int], None], mixed: bool, tmp_path: Path
) -> None:
    specs = {name: checkpoint(tmp_path / name, name) for name in MODELS}
    calm = {name: calm_tokens([specs[name]], [(name, seed) for seed in range(3)]) for name in MODELS}
    changes = {"slots": SLOTS, "mixed_batches": mixed}
    async with running_node(torch_settings(2).model_copy(update=changes)) as node:
        held = [
            DesiredInstance(instance_id=f"i-{name}", slot=slot, gpus=SLOTS[slot].gpus, model=specs[name])
            for name, slot in MODELS.items()
        ]
        await node.hold(1, *held[:2])
        two, one = node.agent.workers
        streams = {name: [read(node, body("r", seed, name)) for seed in range(3)] for name in ("tide", "ebb")}
        running = {name: asyncio.gather(*several) for name, several in streams.items()}
        await node.until(lambda: node.in_flight() == 6 and two.stats.tokens_total > 0)
        assert two.pid is not None
        breaks(other_rank(two.pid))
        node.agent.apply(desired(2, *held))
        for name, several in running.items():
            assert [token_ids(events) for events in await several] == calm[name]
        await node.hold(3, *held)
        assert [token_ids(await read(node, body("s", seed, "neap"))) for seed in range(3)] == calm["neap"]
        assert (two.restarts_total, one.restarts_total) == (1, 0)
        await node.until(node.idle)
