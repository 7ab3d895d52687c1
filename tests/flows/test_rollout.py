"""Another revision of a model takes over its name while clients stream, or goes back where it is worse: none of them
sees an error or a gap.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ops.client.api import Api
from ops.local.replay_stack import replayed_model
from ops.local.sample_fleet import REGIONS, TOKENS_PER_S, offer_model
from ops.local.stack import LocalStack
from tests.flows.conftest import REPLAY_NODES, StackMaker, admin_of, client_of, register, wait_ready, wait_seen
from tests.flows.waiting import wait_until

pytestmark = pytest.mark.slow
CLIENTS, TOKENS = 4, 24
REVISION, LATE_REVISION = "tide-r2", "tide-r3"
EASY, IMPOSSIBLE = ({"IW-N": {"ttft_s": 600.0, "tbt_s": tbt_s}} for tbt_s in (60.0, 1e-6))
"""Objectives that every answer meets, however busy the machine is, and that none does. Neither refuses a request."""
EAST = REGIONS[:1]


@pytest.fixture(scope="module")
def stack(make_stack: StackMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    quick = {"TIDEPOOL_ROLLOUT_EVERY_S": "1"}
    with make_stack(tmp_path_factory.mktemp("rollout"), REPLAY_NODES[:1], environment=quick) as stack:
        with admin_of(stack) as admin, client_of(stack) as client:
            register(admin, ("tide",), EAST, instances_min=2)
            admin.put("/admin/models/tide", replayed_model("tide", 512) | {"slo": EASY})
            wait_ready(admin, 2)
            wait_seen(client, "tide")
        yield stack


class Streams:
    """Clients that stream one answer after the other. `models`: answers by the model that they name."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]
        self.models: Counter[str] = Counter()
        self.faults: list[str] = []

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        client = client_of(self._stack).with_options(max_retries=0)
        asked = 0
        while not self._over.is_set():
            asked += 1
            message = f"client {number} asks for the {asked}. time"
            try:
                chunks = list(
                    client.chat.completions.create(
                        model="tide", messages=[{"role": "user", "content": message}], max_tokens=TOKENS, stream=True
                    )
                )
            except openai.OpenAIError as error:
                self.faults.append(repr(error))
                continue
            with self._lock:
                self.models[chunks[0].model] += 1
            if chunks[-1].choices[0].finish_reason is None or len({chunk.model for chunk in chunks}) != 1:
                self.faults.append(f"a stream of {len(chunks)} chunks did not end, or changed its model")


def begin(admin: Api, model: str, slo: object) -> str:
    admin.put(f"/admin/models/{model}", replayed_model(model, 512) | {"slo": slo})
    offer_model(admin, model, TOKENS_PER_S, [EAST[0].name], 0, 4)
    body = {"alias": "tide", "model": model, "steps": [25, 100], "hold_s": 3.0, "answers_min": 20, "worse_max": 0.1}
    return str(admin.post("/admin/rollouts", body)["id"])


def ended(admin: Api, rollout: str) -> Any:
    """A roll-out when it is over."""
    wait_until(lambda: admin.get(f"/admin/rollouts/{rollout}")["ended_at"] is not None, "the end of the roll-out")
    return admin.get(f"/admin/rollouts/{rollout}")


def test_a_revision_takes_over_without_a_gap(stack: LocalStack) -> None:
    with admin_of(stack) as admin, Streams(stack) as streams:
        rollout = begin(admin, REVISION, EASY)
        wait_until(lambda: streams.models[REVISION] > 0, "the first share")
        assert ended(admin, rollout)["state"] == "done"
        assert admin.get("/admin/aliases/tide")["targets"] == {REVISION: 1}
        before = streams.models.copy()
        wait_until(lambda: streams.models[REVISION] >= before[REVISION] + 3 * CLIENTS, "answers after the end")
    assert not streams.faults
    assert before["tide"] > 0
    assert streams.models["tide"] <= before["tide"] + 2 * CLIENTS, "gateways follow within seconds"


def test_a_revision_whose_answers_are_late_goes_back(stack: LocalStack) -> None:
    with admin_of(stack) as admin, Streams(stack) as streams:
        over = ended(admin, begin(admin, LATE_REVISION, IMPOSSIBLE))
        assert over["state"] == "rolled_back"
        assert "answers missed their objective" in over["reason"]
        assert admin.get("/admin/aliases/tide")["targets"].get(LATE_REVISION, 0) == 0
    assert streams.models[LATE_REVISION] > 0
    assert not streams.faults
