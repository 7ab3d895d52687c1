"""Every child is killed once while a batch runs: each comes back, and every line has exactly one result."""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from ops.local.stack import LocalStack
from tests.flows.conftest import MODELS, StackMaker, admin_of, client_of, register, wait_ready
from tests.flows.waiting import wait_until

REQUESTS = 120


def _batch(client: openai.OpenAI) -> str:
    lines = [
        json.dumps(
            {
                "custom_id": f"r{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": MODELS[number % len(MODELS)],
                    "messages": [{"role": "user", "content": f"wave {number}"}],
                    "max_tokens": 5,
                },
            }
        )
        for number in range(REQUESTS)
    ]
    uploaded = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    return made.id


def _kill_each(stack: LocalStack) -> None:
    for name in stack.supervisor.pids():
        before = stack.supervisor.restarts()[name]
        os.kill(stack.supervisor.pids()[name], signal.SIGKILL)
        wait_until(lambda n=name, b=before: stack.supervisor.restarts()[n] > b, f"{name} restarted")  # type: ignore[misc]
        stack.supervisor.wait_ready(180.0)


def _answers(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(
        model=MODELS[0], messages=[{"role": "user", "content": "still there?"}], max_tokens=3
    )
    assert said.usage is not None
    assert said.usage.completion_tokens == 3


@pytest.mark.slow
def test_killing_any_child_loses_nothing_and_a_second_start_finds_its_data(
    make_stack: StackMaker, tmp_path: Path
) -> None:
    with make_stack(tmp_path) as stack, client_of(stack) as client, admin_of(stack) as admin:
        register(admin)
        wait_ready(admin, len(MODELS) * 3)
        batch_id = _batch(client)
        _kill_each(stack)
        wait_until(lambda: client.batches.retrieve(batch_id).status == "completed", "the batch completed")
        batch = client.batches.retrieve(batch_id)
        assert batch.output_file_id is not None
        lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert Counter(line["custom_id"] for line in lines) == {f"r{n}": 1 for n in range(REQUESTS)}
        assert {line["response"]["status_code"] for line in lines} == {200}
        wait_ready(admin, len(MODELS) * 3)
        _answers(client)
        pids = list(stack.supervisor.pids().values())
    assert not [pid for pid in pids if _alive(pid)]

    with make_stack(tmp_path) as again, client_of(again) as client, admin_of(again) as admin:
        assert again.keys == stack.keys
        assert client.batches.retrieve(batch_id).status == "completed"
        wait_ready(admin, len(MODELS) * 3)
        _answers(client)
        counted = 'tidepool_requests_total{model="tide",outcome="ok"'
        wait_until(lambda: counted in httpx.get(f"{again.url}/metrics").text, "it is counted a little after its end")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
