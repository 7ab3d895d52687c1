"""A node with a slot of two GPUs: a rank that dies takes its worker down and no other, and no token shows it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from dataplane.agent.settings import WorkerSettings
from dataplane.protocol.messages import DesiredInstance
from tests.dataplane.agent.test_torch_node import body, calm_tokens, checkpoint, torch_settings
from tests.dataplane.replay_node import running_node
from tests.dataplane.streams import read, token_ids
from tests.event_loop import asynchronous

SLOTS = (WorkerSettings(gpus=2, ranks=2, memory_bytes=16 * 2**20), WorkerSettings(gpus=1, memory_bytes=8 * 2**20))


def kill_child(pid: int) -> None:
    """Kill the one child of a process."""
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)


@pytest.mark.slow
@asynchronous
async def test_a_killed_rank_changes_no_token_and_no_other_worker(tmp_path: Path) -> None:
    specs = [checkpoint(tmp_path / name, name) for name in ("tide", "ebb")]
    seeds = [(spec.name, seed) for spec in specs for seed in range(3)]
    calm = calm_tokens(specs, seeds)
    async with running_node(torch_settings(2).model_copy(update={"slots": SLOTS})) as node:
        held = [
            DesiredInstance(instance_id=f"i-{spec.name}", slot=slot, gpus=SLOTS[slot].gpus, model=spec)
            for slot, spec in enumerate(specs)
        ]
        await node.hold(1, *held)
        two, one = node.agent.workers
        for kills in (False, True):
            streams = asyncio.gather(*(read(node, body(f"k{kills}", seed, name)) for name, seed in seeds))
            if kills:
                await node.until(lambda: node.in_flight() == len(seeds) and two.stats.tokens_total > 0)
                assert two.pid is not None
                kill_child(two.pid)
            assert [token_ids(events) for events in await streams] == calm
            assert (two.restarts_total, one.restarts_total) == (int(kills), 0)
        await node.until(node.idle)
