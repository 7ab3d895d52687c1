"""A gateway on a free port with the official client, and nodes that answer as told."""

import json
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2 as httpx
from openai import DefaultHttpxClient, OpenAI
from pydantic import SecretStr

from controlplane.api.app import make_app
from controlplane.api.connections import connection_class
from controlplane.api.state import State
from controlplane.store.tables import Role
from dataplane.protocol.records import RecordedEvent
from tests.controlplane.world import NODE_KEY, PATIENCE_S, FakeAgent, World, served


class Gateway:
    """A running gateway. `client` is the official one; `http` is for what that would never send."""

    def __init__(self, world: World, url: str, stack: ExitStack, state: State, secret: str | None) -> None:
        self.world, self.url, self._stack, self.state = world, url, stack, state
        self.secret = secret or world.key()
        self.client = self.client_of(self.secret)
        headers = {"Authorization": f"Bearer {self.secret}"}
        self.http = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S, verify=False))

    def client_of(self, secret: str) -> OpenAI:
        http = DefaultHttpxClient(verify=False)  # reading the machine's certificates takes longer than most tests
        client = OpenAI(base_url=f"{self.url}/v1", api_key=secret, max_retries=0, timeout=PATIENCE_S, http_client=http)
        return self._stack.enter_context(client)

    def connect(self, *, version: str = "1.1", **changes: Any) -> socket.socket:
        """A connection on which a streaming chat request has been sent, and nothing read."""
        url = httpx.URL(self.url)
        body = {"model": "tide", "messages": [{"role": "user", "content": "hi"}], "stream": True} | changes
        sent = json.dumps(body).encode()
        client = self._stack.enter_context(socket.create_connection((url.host, url.port), timeout=PATIENCE_S))
        head = f"POST /v1/chat/completions HTTP/{version}\r\nhost: a\r\nauthorization: Bearer {self.secret}\r\n"
        head += f"content-type: application/json\r\nx-request-id: same\r\ncontent-length: {len(sent)}\r\n\r\n"
        client.sendall(head.encode() + sent)
        return client

    def give_up_soon(self, agent: FakeAgent) -> None:
        """Where this node hangs, it is not waited for; all else takes as long as it takes. One request at a time."""
        client = self.state.sender._agents
        generate, first_token_s, idle_s = client.generate, client._first_token_s, client._idle_s

        def asked(url: str, *args: Any) -> AsyncGenerator[list[RecordedEvent], None]:
            mode = agent.next_mode() if url == agent.url else ""
            client._first_token_s = 0.1 if mode == "hang" else first_token_s
            client._idle_s = 0.1 if mode == "hang later" else idle_s
            return generate(url, *args)

        client.generate = asked  # type: ignore[method-assign]

    def role(self, role: Role) -> OpenAI:
        return self.client_of(self.world.key(role))

    def chat(self, status: int = 200, **changes: Any) -> httpx.Response:
        """POST a chat request, as it stands, and check the shape of a refusal."""
        body = {"model": "tide", "messages": [{"role": "user", "content": "hi"}]} | changes
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == status, answer.text
        if status >= 400:
            assert_error(answer)
        return answer


def assert_error(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert answer.headers["x-request-id"]
    if answer.status_code in {429, 503}:
        assert int(answer.headers["retry-after"]) >= 1
    return error


@contextmanager
def running_gateway(
    world: World, *agents: FakeAgent, used: float = 0.0, secret: str | None = None, **changes: Any
) -> Iterator[Gateway]:
    """A gateway before one instance on each agent; the first is in us-east, the others are in us-west. With the
    `secret` of a key that is there, nothing is written to the database.
    """
    values = {
        "heartbeat_stale_s": 600.0,
        "view_refresh_s": 0.05,
        "request_start_wait_s": 0.0,
        "request_body_bytes_max": 65536,
        "limit_timeout_s": PATIENCE_S,  # a crowded machine is not a Redis that is away
        "node_key": SecretStr(NODE_KEY),
    } | changes
    settings = world.settings.model_copy(update=values)
    if secret is None:
        world.expect_no_loops()
    with ExitStack() as stack:
        for number, agent in enumerate(agents):
            agent.url = stack.enter_context(served(agent.app))
            world.serve(f"n{number}", agent.url, region="us-west" if number else "us-east", used=used)
        app = make_app(settings)
        url = stack.enter_context(served(app, http=connection_class(settings)))
        yield Gateway(world, url, stack, app.state.tidepool, secret)
