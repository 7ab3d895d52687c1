"""How objectives were kept: a gateway's answers are counted, and the overview and a series tell."""

from typing import Any

import httpx2 as httpx

from controlplane.store.tables import Role
from tests.controlplane.api.gateway import running_gateway
from tests.controlplane.world import FakeAgent, World, until


def test_answers_count_for_the_region_that_served_them(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        for _ in range(2):
            gateway.chat()
        gateway.chat(stream=True)
        gateway.chat(404, model="unknown")
        secret = world.key(Role.VIEWER)

        def asked(path: str, **query: Any) -> Any:
            answer = httpx.get(
                f"{gateway.url}/admin/{path}", params=query, headers={"Authorization": f"Bearer {secret}"}
            )
            assert answer.status_code == 200, answer.text
            return answer.json()

        def counted() -> bool:
            gateway.state.objectives.flush()
            return sum(point["answers"] for point in asked("objectives")["data"]) == 3

        until(counted)
        series = asked("objectives", model="tide", region="us-east")
        assert series["bucket_s"] == 600
        assert {point["tier"] for point in series["data"]} == {"IW-N"}
        assert sum(point["tokens"] for point in series["data"]) == 9
        assert asked("objectives", region="us-west")["data"] == []
        assert asked("objectives", since_s=series["data"][-1]["start_s"] + 600)["data"] == []
        kept = {region["name"]: region["objectives"] for region in asked("overview")["regions"]}
        [tier] = kept["us-east"]
        assert (tier["tier"], tier["answers_now"], tier["answers_day"]) == ("IW-N", 3, 3)
        assert tier["kept_day"] == sum(point["kept"] for point in series["data"])
        assert kept.get("us-west", []) == []


def test_an_answer_that_no_node_could_give_has_missed_its_objective(world: World) -> None:
    with running_gateway(world, FakeAgent(then="die")) as gateway:
        refusal = gateway.http.post(
            "/v1/chat/completions", json={"model": "tide", "messages": [{"role": "user", "content": "hi"}]}
        )
        assert refusal.status_code >= 500
        secret = world.key(Role.VIEWER)

        def counted() -> list[tuple[int, int]]:
            gateway.state.objectives.flush()
            answer = httpx.get(f"{gateway.url}/admin/objectives", headers={"Authorization": f"Bearer {secret}"})
            return [(point["answers"], point["kept"]) for point in answer.json()["data"]]

        until(lambda: counted() == [(1, 0)])
