"""A stream outlives its node, whatever was asked for: tools, a schema, penalties, log probabilities, choices."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from ops.faults.load import Reading
from ops.local.stack import LocalStack
from tests.flows.checkpoints import checkpoint_stack, tool_model
from tests.flows.conftest import admin_of
from tests.flows.waiting import wait_until

pytestmark = pytest.mark.slow
MODEL = "tiny-qwen3"
CHUNKS = 4
"""A node is killed after so many chunks of an answer."""
SCHEMA = {
    "type": "object",
    "properties": {"ports": {"type": "array", "items": {"enum": ["brest", "cork"]}, "minItems": 12, "maxItems": 15}},
    "required": ["ports"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
ASKED: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "tools": {"tools": TOOLS, "tool_choice": "required", "temperature": 1},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        "temperature": 1.5,
    },
    "scored": {"logprobs": True, "top_logprobs": 3, "temperature": 1, "frequency_penalty": 1, "presence_penalty": 0.5},
    "repeated": {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {"65": 4}},
    "several": {"n": 3, "temperature": 1, "logprobs": True},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Two regions with a node each, and an instance of one model on both."""
    folder = tool_model(tmp_path_factory.mktemp("models"), MODEL)
    with checkpoint_stack(tmp_path_factory.mktemp("outlive"), {MODEL: folder}, regions=2) as running:
        yield running


def _body(asked: str) -> dict[str, Any]:
    ignored = {} if asked in {"tools", "schema"} else {"ignore_eos": True}
    messages = [{"role": "user", "content": "When is the tide in Brest? " * 10}]
    return (
        {
            "model": MODEL,
            "messages": messages,
            "max_tokens": 500 if asked in {"tools", "schema"} else 160,
            "seed": 5,
            "stream": True,
        }
        | ignored
        | ASKED[asked]
    )


def _read(stack: LocalStack, asked: str, *, kill: bool) -> dict[str, str]:
    """The channels of an answer; its node is killed once it has begun, if `kill`."""
    reading = Reading()
    headers = {"Authorization": f"Bearer {stack.keys['client']}"}
    with (
        httpx.Client(base_url=stack.url, headers=headers, timeout=120, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=_body(asked)) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        left = CHUNKS
        for line in answer.iter_lines():
            reading.take(line)
            left -= line.startswith("data: ")
            if kill and left == 0:
                _kill_agent(stack, answer.headers["x-tidepool-region"])
    assert reading.done, f"{asked}: {reading.reason}"
    return {channel: "".join(texts) for channel, texts in reading.parts.items()}


def _kill_agent(stack: LocalStack, region: str) -> None:
    [name] = [name for name in stack.supervisor.pids() if name.startswith("agent") and region in name]
    os.kill(stack.supervisor.pids()[name], signal.SIGKILL)


def _continuations(stack: LocalStack) -> int:
    with admin_of(stack) as admin:
        return sum(row["continuations"] for row in admin.get("/admin/requests", limit=50)["data"])


@pytest.mark.parametrize("asked", ASKED)
def test_it_continues_token_for_token(stack: LocalStack, asked: str) -> None:
    undisturbed = _read(stack, asked, kill=False)
    assert undisturbed
    if asked in {"tools", "schema"}:
        [text] = undisturbed.values()
        assert set(json.loads(text.removeprefix("look"))["ports"]) <= {"brest", "cork"}
    for _ in range(5):  # a tiny model may have written its whole answer before the signal arrives
        before, boots = _continuations(stack), set(_boots(stack))
        assert _read(stack, asked, kill=True) == undisturbed
        wait_until(lambda boots=boots: _are_back(stack, boots), "the killed agent is back, and all is ready")
        if _continuations(stack) > before:
            return
    pytest.fail("no stream was continued: the test has proved nothing")


def _are_back(stack: LocalStack, boots: set[str]) -> bool:
    now = _boots(stack)
    return len(set(now) - boots) == 1 and all(now.values())


def _boots(stack: LocalStack) -> dict[str, bool]:
    """Whether its instance is ready, by the boot of each agent. Rows of instances stay ready for long after a kill."""
    with admin_of(stack) as admin:
        names = [node["name"] for node in admin.pages("/admin/nodes")["data"]]
        lives = [admin.get(f"/admin/nodes/{name}")["live"] for name in names]
    return {live["boot_id"]: [one["state"] for one in live["instances"]] == ["ready"] for live in lives}
