"""An adapter that the instances of its base serve: from its registration to its answers, and away with none broken."""

import threading
from pathlib import Path

import openai
import pytest

from ops.client.api import Api, CommandError
from ops.local.replay_stack import replayed_model
from ops.local.sample_fleet import REGIONS, live_instances
from tests.flows.conftest import REPLAY_NODES, admin_of, client_of, register, replay_stack, wait_ready
from tests.flows.waiting import wait_until

REGION = REGIONS[0]


def add(admin: Api, name: str) -> None:
    body = replayed_model("tide", 512) | {"path": f"/adapters/{name}", "weights_bytes": 4096, "parameters": None}
    admin.put(f"/admin/models/{name}", body | {"base": "tide", "with_base": True})


def states(admin: Api, name: str) -> list[str]:
    return [row["state"] for row in admin.get("/admin/adapter-instances", model=name)["data"]]


def test_adapters_come_and_go_on_the_instances_of_their_base(tmp_path: Path) -> None:
    nodes = tuple(node for node in REPLAY_NODES if node.region == REGION.name)
    with replay_stack(tmp_path, nodes) as stack, client_of(stack) as client, admin_of(stack) as admin:
        register(admin, ("tide",), (REGION,), instances_min=2)
        wait_ready(admin, 2)
        before = {row["id"]: row["changed_at"] for row in live_instances(admin)}

        def answer(model: str) -> str:
            made = client.completions.create(model=model, prompt="the tide", max_tokens=12, temperature=0)
            return made.choices[0].text

        add(admin, "ebb")
        add(admin, "flood")
        wait_until(lambda: states(admin, "ebb") == ["ready"] * 2 == states(admin, "flood"), "both on both instances")
        answers = {name: answer(name) for name in ("tide", "ebb", "flood")}
        assert len(set(answers.values())) == 3
        rows = admin.get("/admin/adapter-instances", model="ebb")["data"]
        assert {row["host"] for row in rows} == before.keys()
        offered = {"model": "ebb", "region": REGION.name, "instances_min": 0, "instances_max": 0}
        with pytest.raises(CommandError, match="'ebb' is served by the instances of 'tide'"):
            admin.put("/admin/endpoints", offered)

        texts: list[str] = []
        begun = threading.Event()

        def stream() -> None:
            for chunk in client.completions.create(model="ebb", prompt="the tide", max_tokens=800, stream=True):
                texts.append(chunk.choices[0].text)
                begun.set()

        streaming = threading.Thread(target=stream)
        streaming.start()
        assert begun.wait(60)
        admin.delete("/admin/models/ebb")
        streaming.join(120)
        assert len("".join(texts).split()) > 400, "it was answered to its end"
        with pytest.raises(openai.NotFoundError):
            answer("ebb")
        assert {name: answer(name) for name in ("tide", "flood")} == {n: answers[n] for n in ("tide", "flood")}
        assert {row["id"]: row["changed_at"] for row in live_instances(admin)} == before, "none was restarted"
