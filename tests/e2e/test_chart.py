"""What the chart renders runs: a stream, a batch, a killed gateway and a killed agent, and nothing left at the end.

The tests are steps of one release's life, in the order of this file.
"""

import json
import time
from collections import Counter

import openai
import pytest

from tests.e2e.release import KEYS, LIMIT_S, MESSAGES, MODEL, Release, left_behind, remove, streamed
from tests.flows.waiting import wait_until

PROCESSES = {"gateway", "dispatcher", "worker", "forecaster", "beat", "agent"}
LINES = 300


def _serves(release: Release) -> str:
    """Wait for a streamed answer, and return it."""
    answers: list[str] = []
    with release.client() as client:
        wait_until(lambda: bool(answers.append(streamed(client)) or answers[-1]), "an answer is streamed", LIMIT_S)
    return answers[-1]


def test_each_process_of_the_chart_runs_confined(release: Release) -> None:
    containers = release.containers()
    assert set(containers) == PROCESSES
    for name, container in containers.items():
        found = release.podman.inspect(container)
        assert found["State"]["Running"], (name, release.podman.run("logs", "--tail=20", container))
        assert found["HostConfig"]["ReadonlyRootfs"], name
        assert found["EffectiveCaps"] in ([], None), name
        assert found["Config"]["User"] == "10001:10001", name


def test_a_chat_completion_is_streamed_through_the_gateway(release: Release) -> None:
    first = _serves(release)
    assert first == _serves(release)
    with release.client() as client:
        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0)
    assert whole.choices[0].message.content == first


def test_every_probe_of_the_chart_is_answered(release: Release) -> None:
    assert {name for name, urls in release.probes.items() if urls} == {"gateway", "agent"}
    assert release.is_healthy("gateway")
    assert release.is_healthy("agent")


def _batch(client: openai.OpenAI) -> str:
    """A batch that takes longer than its process' death is away."""
    lines = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": MESSAGES, "max_tokens": 64},
        }
        for number in range(LINES)
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    uploaded = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    return made.id


@pytest.mark.parametrize("killed", ["gateway", "agent"])
def test_a_killed_pod_comes_back_and_no_line_of_a_batch_is_lost(
    release: Release, killed: str, figures: list[str]
) -> None:
    with release.client() as client:
        batch_id = _batch(client)
        wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed > 0, "a line is done", LIMIT_S)
        assert client.batches.retrieve(batch_id).status == "in_progress"
        killed_s = time.monotonic()
        release.kill(killed)
        wait_until(lambda: release.is_healthy(killed), f"the {killed} is ready again", LIMIT_S)
        assert _serves(release)
        figures.append(f"chart: an answer {time.monotonic() - killed_s:.1f} s after the {killed} was killed")
        wait_until(lambda: client.batches.retrieve(batch_id).status == "completed", "the batch ends", LIMIT_S)
        output = client.batches.retrieve(batch_id).output_file_id
        assert output is not None
        lines = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    assert Counter(line["custom_id"] for line in lines) == {f"r{number}": 1 for number in range(LINES)}
    assert {line["response"]["status_code"] for line in lines} == {200}


def test_a_release_that_is_played_anew_serves_what_it_knew(release: Release, figures: list[str]) -> None:
    """All pods are removed and played at once; the database and the volumes stay."""
    release.podman.play_down(release.workloads)
    assert left_behind(release.podman) == sorted({KEYS, *release.volumes()})
    started_s = time.monotonic()
    release.podman.play(release.workloads)
    played_s = time.monotonic() - started_s
    _serves(release)
    figures.append(
        f"chart: first streamed answer {time.monotonic() - started_s:.1f} s after `podman play kube` began"
        f" (which took {played_s:.1f} s)"
    )
    with release.client() as client:
        assert {batch.status for batch in client.batches.list()} <= {"completed"}


def test_nothing_is_left_of_a_release_that_is_removed(release: Release, figures: list[str]) -> None:
    for image in release.images():
        size_bytes = json.loads(release.podman.run("image", "inspect", image))[0]["Size"]
        figures.append(f"image {image}: {size_bytes / 1e6:,.0f} MB")
    remove(release)
    assert left_behind(release.podman) == []
