"""`/tokenize` and `/detokenize` before nodes that answer as told."""

from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.store.tenants import Tenant, put_tenant
from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.world import FakeAgent, World

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "hi"}]


@pytest.fixture
def agents() -> tuple[FakeAgent, FakeAgent]:
    return FakeAgent(), FakeAgent()


@pytest.fixture
def gateway(world: World, agents: tuple[FakeAgent, FakeAgent]) -> Iterator[Gateway]:
    with running_gateway(world, *agents) as gateway:
        yield gateway


def post(gateway: Gateway, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = gateway.http.post(path, json={"model": "tide"} | body)
    assert answer.status_code == status, answer.text
    if status >= 400:
        return assert_error(answer)
    answered: dict[str, Any] = answer.json()
    return answered


def test_a_prompt_and_a_conversation_are_tokenized(gateway: Gateway, agents: tuple[FakeAgent, FakeAgent]) -> None:
    answer = post(gateway, "/tokenize", prompt="hi")
    assert answer == {"count": 3, "max_model_len": 99, "tokens": [1, 2, 3], "token_strs": None}
    answer = post(
        gateway,
        "/tokenize",
        messages=ASKED,
        tools=[TOOL],
        add_generation_prompt=False,
        return_token_strs=True,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert answer["token_strs"] == ["a", "a", "a"]
    plain, chat = agents[0].questions
    assert (plain.prompt, plain.special_tokens, plain.messages) == ("hi", True, None)
    assert (chat.special_tokens, chat.answer, chat.template) == (False, False, {"enable_thinking": False})
    assert [tool.name for tool in chat.tools] == ["weather"]


def test_tokens_become_text(gateway: Gateway, agents: tuple[FakeAgent, FakeAgent]) -> None:
    assert post(gateway, "/detokenize", tokens=[5, 6]) == {"prompt": "the tide"}
    assert agents[0].questions[0].tokens == (5, 6)


def test_another_node_is_asked_where_one_fails(gateway: Gateway, agents: tuple[FakeAgent, FakeAgent]) -> None:
    agents[0].script = ["overloaded"]
    assert post(gateway, "/tokenize", prompt="hi")["count"] == 3
    assert (len(agents[0].questions), len(agents[1].questions)) == (1, 1)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": ASKED}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "a", "word": 1}, "word"),
        ("/tokenize", {"messages": ASKED, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": ASKED, "tools": [TOOL, TOOL]}, "tools"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "hi"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_refusals_name_the_field(gateway: Gateway, path: str, body: dict[str, Any], param: str) -> None:
    assert post(gateway, path, status=400, **body)["param"] == param


def test_a_model_must_be_there_and_ready_and_the_key_good(gateway: Gateway) -> None:
    assert post(gateway, "/tokenize", status=404, prompt="hi", model="nobody")["code"] == "model_not_found"
    gateway.http.headers.pop("authorization")
    assert post(gateway, "/tokenize", status=401, prompt="hi")["code"] == "invalid_api_key"


@pytest.mark.usefixtures("redis_clock")
def test_it_counts_towards_the_requests_of_a_tenant(world: World) -> None:
    with world.database.transaction() as session:
        put_tenant(session, Tenant(name="acme", requests_per_minute=1))
    with running_gateway(world, FakeAgent()) as gateway:
        post(gateway, "/tokenize", prompt="hi")
        assert post(gateway, "/detokenize", status=429, tokens=[1])["code"] == "rate_limit_exceeded"
