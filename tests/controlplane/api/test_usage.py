"""Usage over the API: what a gateway answered is counted once, by its tenant, and can be asked for."""

from typing import Any

import httpx2 as httpx

from controlplane.store.tables import Role
from tests.controlplane.api.gateway import running_gateway
from tests.controlplane.world import FakeAgent, World, until


def test_answers_of_a_gateway_count_for_their_tenant(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        for _ in range(2):
            gateway.chat()
        gateway.chat(stream=True)
        gateway.chat(404, model="unknown")
        secret = world.key(Role.VIEWER)

        def usage(status: int = 200, **query: Any) -> Any:
            headers = {"Authorization": f"Bearer {secret}"}
            answer = httpx.get(f"{gateway.url}/admin/usage", params=query, headers=headers)
            assert answer.status_code == status, answer.text
            return answer.json()

        def counted() -> bool:
            gateway.state.usage.flush()
            return [row["requests"] for row in usage(by="tenant")["data"]] == [3]

        until(counted)
        [row] = usage(by=["model", "tenant", "tier", "day"])["data"]
        assert (row["tenant"], row["model"], row["tier"], row["hour"]) == ("acme", "tide", "IW-N", None)
        assert (row["requests"], row["failed"], row["input_tokens"], row["output_tokens"]) == (3, 0, 21, 9)
        assert row["day"].endswith("T00:00:00Z")
        assert usage(tenant="blue")["data"] == []
        assert usage(400, by="colour")["param"] == "by.0"
