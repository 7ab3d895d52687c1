"""The drill: an installation is backed up while it is written to, destroyed, restored elsewhere, and goes on."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ops.faults.check import BatchCheck
from ops.faults.load import Load, Sent
from ops.faults.stack import FaultStack
from ops.local.replay_stack import Fleet

FLEET = Fleet(regions=1, nodes=2, models=2)
COMMAND_TIMEOUT_S = 300.0
LINES = 150
Answers = Mapping[tuple[str, int], Mapping[str, str]]


def tidepool(home: Path, *arguments: str) -> Any:
    """A command's JSON, as an operator runs it beside the stack of a home."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDEPOOL_")}
    done = subprocess.run(
        [sys.executable, "-m", "ops.cli.main", *arguments, "--home", str(home), "--json"],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def load_of(stack: FaultStack) -> Load:
    return Load(stack.local.urls, stack.local.keys["client"], FLEET.model_names(), seed=1)


async def back_up_under_load(stack: FaultStack, folder: Path) -> tuple[Sent, Answers]:
    """What was acknowledged before the backup began, and the right answers."""
    async with stack.running():
        await stack.register()
        await stack.wait_ready()
        load, stop = load_of(stack), asyncio.Event()
        answers = await load.undisturbed()
        writes = asyncio.create_task(load.batches(LINES, 0.5, stop))
        while len(load.sent.batches) < 2 and not writes.done():  # noqa: ASYNC110 - another task appends
            await asyncio.sleep(0.1)
        acknowledged = Sent(batches=list(load.sent.batches))
        made = await asyncio.to_thread(tidepool, stack.home, "backup", str(folder))
        assert made["gone"] == []
        while len(load.sent.batches) == len(acknowledged.batches) and not writes.done():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        stop.set()
        await writes
        await load.close()
    return acknowledged, answers


async def go_on(stack: FaultStack, acknowledged: Sent, answers: Answers) -> BatchCheck:
    """Start the restored installation, and check every batch when it has ended."""
    async with stack.running():
        await stack.wait_ready()
        check = BatchCheck(stack.local.url, stack.local.keys["client"], answers)
        await check.run(acknowledged)
        load = load_of(stack)
        assert (await load.undisturbed()) == answers, "the same keys and models serve again"
        await load.close()
    return check


@pytest.mark.slow
def test_what_was_acknowledged_before_the_backup_outlives_the_installation(tmp_path: Path) -> None:
    lost, restored, folder = tmp_path / "lost", tmp_path / "restored", tmp_path / "backup"
    stack = FaultStack(lost, FLEET, gateways=1, programs={})
    keys = stack.local.keys
    acknowledged, answers = asyncio.run(back_up_under_load(stack, folder))
    assert len(acknowledged.batches) >= 2
    shutil.rmtree(lost)
    assert tidepool(restored, "restore", str(folder))["with_files"]
    stack = FaultStack(restored, FLEET, gateways=1, programs={})
    assert stack.local.keys == keys
    check = asyncio.run(go_on(stack, acknowledged, answers))
    assert check.findings == []
    assert check.lines == LINES * len(acknowledged.batches)
    assert dict(check.codes) == {"200": check.lines}
