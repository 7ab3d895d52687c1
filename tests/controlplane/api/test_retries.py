"""`x-should-retry`, as the official client obeys it: it tries again where that may help, and only there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.redis_clock import RedisClock
from tests.controlplane.world import FakeAgent, World


@contextmanager
def insistent(
    gateway: Gateway, *hooks: Callable[[httpx.Response], None]
) -> Iterator[tuple[openai.OpenAI, list[httpx.Response]]]:
    """A client that tries once more, and all answers that it gets."""
    answers: list[httpx.Response] = []
    http = openai.DefaultHttpxClient(event_hooks={"response": [answers.append, *hooks]})
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.secret, max_retries=1, http_client=http) as client:
        yield client, answers


def ask(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="tide", messages=[{"role": "user", "content": "hi"}])


def hand_in(client: openai.OpenAI) -> Any:
    return client.files.create(file=("in.jsonl", b'{"custom_id": "a"}\n'), purpose="batch")


@pytest.mark.parametrize(
    ("call", "statuses", "helps"),
    [(ask, [503, 503], "true"), (hand_in, [503], "false")],
    ids=["no instance now", "the disk is full"],
)
def test_what_a_retry_may_mend_is_asked_again(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[openai.OpenAI], Any],
    statuses: list[int],
    helps: str,
) -> None:
    with running_gateway(world) as gateway, insistent(gateway) as (client, answers):
        monkeypatch.setattr(gateway.state.blobs, "free_bytes", lambda: 0)
        with pytest.raises(openai.InternalServerError):
            call(client)
        assert [answer.status_code for answer in answers] == statuses
        assert {answer.headers["x-should-retry"] for answer in answers} == {helps}


def test_a_limit_is_worth_another_try(world: World, redis_clock: RedisClock) -> None:
    def wait(answer: httpx.Response) -> None:
        redis_clock.move(int(answer.headers.get("retry-after", 0)))

    with (
        running_gateway(world, FakeAgent(), tenant_requests_per_minute=20) as gateway,
        insistent(gateway, wait) as (client, answers),
    ):
        for _ in range(21):
            ask(client)
        assert [answer.status_code for answer in answers] == [200] * 20 + [429, 200]
        assert answers[20].headers["x-should-retry"] == "true"


@pytest.mark.parametrize(
    ("path", "body", "status", "helps"),
    [
        ("/v1/chat/completions", {"model": "tide"}, 400, "false"),
        ("/v1/completions", {"model": "nobody", "prompt": "x"}, 404, "false"),
        ("/v1/completions", {"model": "tide", "prompt": "x"}, 503, "true"),
    ],
)
def test_every_error_says_whether_to_try_again(
    world: World, path: str, body: dict[str, Any], status: int, helps: str
) -> None:
    with running_gateway(world) as gateway:
        answer = gateway.http.post(path, json=body)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (status, helps)
        waits = [name for name in ("retry-after", "retry-after-ms") if name in answer.headers]
        assert len(waits) == (2 if helps == "true" else 0)
        if waits:
            assert int(answer.headers["retry-after-ms"]) <= 1000 * int(answer.headers["retry-after"])
