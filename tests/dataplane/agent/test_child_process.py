"""Processes that work on what others wrote, without the agent's secrets and out of reach of its terminal."""

import asyncio
import os
from pathlib import Path

import pytest

from dataplane.agent.child_process import ChildProcess
from dataplane.agent.constraints import ConstraintChecker
from dataplane.agent.templates.renderers import TemplateRenderers
from dataplane.protocol.messages import Constraint
from ops.local.tiny_models import build_tiny_models
from tests.dataplane.replay_node import settings
from tests.event_loop import PATIENCE_S, asynchronous

SECRET = "secret-of-the-node"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[ChildProcess]:
    """The child processes that are started; the agent has a secret in its environment."""
    started: list[ChildProcess] = []
    made = ChildProcess.__init__

    def noted(self: ChildProcess, *args: object) -> None:
        made(self, *args)  # type: ignore[arg-type]
        started.append(self)

    monkeypatch.setattr(ChildProcess, "__init__", noted)
    monkeypatch.setenv("TIDEPOOL_AGENT_NODE_KEY", SECRET)
    return started


def assert_apart(children: list[ChildProcess]) -> None:
    [child] = children
    assert SECRET not in Path(f"/proc/{child.process.pid}/environ").read_text()
    assert os.getpgid(child.process.pid) == child.process.pid


@asynchronous
async def test_a_template_process_has_no_secrets(children: list[ChildProcess]) -> None:
    renderers = TemplateRenderers(processes_max=1, time_max_s=PATIENCE_S)
    assert await renderers.render("{{ x }}", {"x": 1}) == "1"
    assert_apart(children)
    await renderers.close()


@asynchronous
async def test_the_process_that_compiles_definitions_has_no_secrets(
    children: list[ChildProcess], tmp_path: Path
) -> None:
    [model] = build_tiny_models(tmp_path, ["tiny-llama"])
    checker = ConstraintChecker(settings(constraint_compile_max_s=PATIENCE_S))
    await checker.check(Constraint(kind="regex", definition="[0-9]"), str(model.path))
    assert_apart(children)
    await checker.close()


@asynchronous
async def test_one_that_died_unnoticed_is_replaced(children: list[ChildProcess], tmp_path: Path) -> None:
    [model] = build_tiny_models(tmp_path, ["tiny-llama"])
    checker = ConstraintChecker(settings(constraint_compile_max_s=PATIENCE_S))
    await checker.check(Constraint(kind="regex", definition="[0-9]"), str(model.path))
    children[0].process.kill()
    children[0].process.wait()
    await checker.check(Constraint(kind="regex", definition="[a-z]"), str(model.path))
    assert len(children) == 2
    await checker.close()


@asynchronous
async def test_one_is_waited_for_though_its_kill_is_cancelled() -> None:
    child = await ChildProcess.start("dataplane.agent.templates.process")
    ending = asyncio.create_task(child.kill())
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    assert child.process.returncode is not None
