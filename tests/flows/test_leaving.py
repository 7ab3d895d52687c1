"""A node that is told to leave is not missed: its instances are served elsewhere before it goes, and it comes back."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import openai

from ops.client.api import Api
from ops.local.sample_fleet import REGIONS, live_instances
from tests.flows.conftest import REPLAY_NODES, admin_of, client_of, register, replay_stack, wait_ready, wait_seen
from tests.flows.waiting import wait_until

REGION = REGIONS[0]
NODES = tuple(
    replace(REPLAY_NODES[0], name=f"{REGION.name}-{number}", region=REGION.name, gpu_type=REGION.gpu_type)
    for number in (1, 2)
)


class Asking:
    """One short request after the other, until told to stop."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> "Asking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        client = self._client.with_options(max_retries=0)
        while not self._stop.is_set():
            try:
                client.completions.create(model="tide", prompt="the tide", max_tokens=8)
                self.answered += 1
            except openai.OpenAIError as error:
                self.failures.append(str(error))

    def more(self, count: int) -> None:
        """Wait for so many more answers."""
        wanted = self.answered + count
        wait_until(lambda: self.answered >= wanted or bool(self.failures), f"{count} more answers")


def nodes_serving(admin: Api) -> list[str]:
    return [str(row["node"]) for row in live_instances(admin) if row["desired"] == "running"]


def test_a_node_that_leaves_is_not_missed(tmp_path: Path) -> None:
    with replay_stack(tmp_path, NODES) as stack, client_of(stack) as client, admin_of(stack) as admin:
        register(admin, ("tide",), (REGION,))
        wait_ready(admin, 1)
        wait_seen(client, "tide")
        (first,) = nodes_serving(admin)
        other = next(node.name for node in NODES if node.name != first)
        with Asking(client) as asking:
            asking.more(5)
            pid = stack.supervisor.pids()[f"agent-{first}"]
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: stack.supervisor.pids().get(f"agent-{first}") not in {pid, None}, "the agent is back")
            asking.more(5)
            assert nodes_serving(admin) == [other]
            wait_until(lambda: not admin.get(f"/admin/nodes/{first}")["leaving"], "the node is in service again")

            admin.post(f"/admin/nodes/{other}/drain", {})
            wait_until(lambda: nodes_serving(admin) == [first], "the drained node hands over")
            asking.more(5)
        assert asking.failures == []
