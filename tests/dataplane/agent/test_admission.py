"""What changes on a node while a request is tokenized: its lease, its instance and its model are looked at again."""

from typing import Any

import msgspec
import pytest

from dataplane.protocol.messages import DesiredInstance, Failed, Generate, Sampling
from tests.dataplane.replay_node import Node, desired, generate, instance, running_node
from tests.event_loop import asynchronous

POOLED = {"sampling": Sampling(), "pooling": True}


async def answered(node: Node, monkeypatch: pytest.MonkeyPatch, body: Generate, *changed: DesiredInstance) -> Failed:
    """The refusal of a request during whose tokenization the node gets another desired state."""
    tokenize = node.agent._prompts.tokenize

    async def late(*args: Any, **kwargs: Any) -> Any:
        prompt = await tokenize(*args, **kwargs)
        node.agent.apply(desired(2, *changed))
        await node.until(lambda: set(node.states().values()) <= {"ready", "spot"})
        return prompt

    monkeypatch.setattr(node.agent._prompts, "tokenize", late)
    response = await node.post(body)
    assert response.status_code == 409, response.text
    assert node.in_flight() == 0
    return msgspec.json.decode(response.content, type=Failed)


@pytest.mark.parametrize("changes", [{}, {"task": "embed"}], ids=["generates", "embeds"])
@asynchronous
async def test_a_lease_that_ended_meanwhile(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    lent = msgspec.structs.replace(instance(**changes), spot=True, lease_id="lease_1")
    async with running_node() as node:
        node.agent.apply(desired(1, lent))
        await node.until(lambda: node.states() == {"i1": "spot"})
        body = generate(lease_id="lease_1", **(POOLED if changes else {}))
        failed = await answered(node, monkeypatch, body, msgspec.structs.replace(lent, lease_id="lease_2"))
        assert (failed.param, failed.retryable) == ("lease_id", True)


@pytest.mark.parametrize("changes", [{}, {"task": "embed"}], ids=["generates", "embeds"])
@asynchronous
async def test_an_instance_that_has_another_model_of_the_name(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    async with running_node() as node:
        await node.hold(1, instance(**changes))
        other = instance(context_tokens=1024, **changes)
        failed = await answered(node, monkeypatch, generate(**(POOLED if changes else {})), other)
        assert "was replaced while the request was tokenized" in failed.message
        assert failed.retryable


@asynchronous
async def test_an_instance_that_was_taken_off_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_node() as node:
        await node.hold(1, instance())
        failed = await answered(node, monkeypatch, generate())
        assert "is not on this node" in failed.message
