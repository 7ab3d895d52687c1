"""`tidepool demo` and `tidepool up` as a newcomer runs them: real models, real processes, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import pytest

from ops.client.api import open_api
from ops.local.ports import free_port
from tests.flows.waiting import wait_until

TIDEPOOL = (sys.executable, "-m", "ops.cli.main")
SESSION = "TIDEPOOL_TEST_SESSION"


def _left_behind(mark: str) -> list[str]:
    """Command lines of processes that carry the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{SESSION}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # gone meanwhile, or not ours to read
    return found


def _environment(mark: str, **more: str) -> dict[str, str]:
    return {**os.environ, SESSION: mark, **more}


def test_the_demo_does_the_main_job_and_leaves_nothing_behind(tmp_path: Path) -> None:
    env = _environment(str(tmp_path), TMPDIR=str(tmp_path))
    ended = subprocess.run([*TIDEPOOL, "demo"], env=env, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for words in (
        "never more than 2 in memory; alone, each gives the same answer",
        "200 output lines, one for each of 200 requests, no errors",
        "highs, optimal",
        "agents hold the plan",
    ):
        assert words in ended.stdout, ended.stdout
    spoken, why_not = "The capital of France is Paris.", "Without the pretrained model smollm2-135m: "
    assert (spoken in ended.stdout) is not (why_not in ended.stdout), ended.stdout
    wait_until(lambda: _left_behind(str(tmp_path)) == [], "every child ended")  # a killed one is there for a moment
    assert not list(tmp_path.glob("tidepool-demo-*"))


def _check_nothing_was_measured(url: str, key: str) -> None:
    """`up` asks no model anything, so nothing was counted and no answer kept or missed an objective."""
    with open_api(url, key) as admin:
        live = admin.get("/admin/status/live")
        assert live["objectives"] == []
        assert any(endpoint["utilization"] is not None for endpoint in live["endpoints"])
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        assert b"tidepool_requests_total{" not in answer.read()


@pytest.mark.slow
def test_up_says_ready_serves_and_ends_with_all_its_children(tmp_path: Path) -> None:
    port = str(free_port())
    env = _environment(str(tmp_path), TIDEPOOL_HOME=str(tmp_path))
    with subprocess.Popen(
        [*TIDEPOOL, "up", "--tiny", "--port", port], env=env, stdout=subprocess.PIPE, text=True
    ) as up:
        try:
            assert up.stdout is not None
            assert up.stdout.readline() == f"ready http://127.0.0.1:{port}\n"
            keys = tmp_path / "keys.json"
            assert keys.stat().st_mode & 0o777 == 0o600
            status = subprocess.run(
                [*TIDEPOOL, "status", "--json"], env=env, capture_output=True, text=True, check=False
            )
            assert status.returncode == 0, f"commands of this home find its API: {status.stderr}"
            _check_nothing_was_measured(f"http://127.0.0.1:{port}", json.loads(keys.read_text())["admin"])
            with openai.OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key=json.loads(keys.read_text())["client"]
            ) as ai:
                names = [model.id for model in ai.models.list()]
                assert len(names) == 8
                for name in names:
                    said = ai.completions.create(
                        model=name, prompt="The tide", max_tokens=4, extra_body={"ignore_eos": True}
                    )
                    assert said.usage is not None
                    assert said.usage.completion_tokens == 4
            assert len(_left_behind(str(tmp_path))) > 8
        finally:
            up.send_signal(signal.SIGTERM)
        assert up.wait(120) == 0
    wait_until(lambda: _left_behind(str(tmp_path)) == [], "every child ended")
