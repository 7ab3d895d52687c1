"""The compose file resolves, and its services serve: one streamed answer, from this project's images and servers of the
releases that the file names.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
import yaml

from ops.client.api import open_api
from ops.local.ports import free_port
from ops.local.wheels import postgres_binary, valkey_binary
from tests.e2e.podman import TIMEOUT_S, Podman, PodmanError
from tests.e2e.release import LIMIT_S, POLL_S, left_behind, node_key, readable_models, register, streamed
from tests.flows.waiting import wait_until

COMPOSE = Path(__file__).parents[2] / "ops" / "deploy" / "compose"
SERVERS = Path(__file__).parent / "servers"
PROJECT, REGION, NODE = "tide-compose", "here", "node-1"
ROLES = ("admin", "client", "node")
PROCESSES = {"api", "dispatcher", "worker", "forecaster", "beat", "agent", "postgres", "valkey"}


class Stack:
    """The compose file's project. `folder` has its `.env` and its models."""

    def __init__(self, folder: Path) -> None:
        self.podman = Podman(folder)
        self.url = f"http://127.0.0.1:{free_port()}"
        self.models = folder / "models"
        self._folder = folder
        self._values = {
            "POSTGRES_PASSWORD": "brackish",
            "LISTEN": self.url.removeprefix("http://"),
            "NODE_IMAGE": "localhost/tidepool-node-cpu:0.1.0",
            "GPUS": "/dev/null",
            "GPU_TYPE": "cpu",
            "SLOTS": '[{"gpus":1,"memory_bytes":1073741824}]',
            "SHARED_MEMORY": "1g",
            "MODELS": str(self.models),
        }
        self.set()

    def set(self, **values: str) -> None:
        """Change `.env`."""
        self._values |= values
        (self._folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in self._values.items()))

    def run(self, *arguments: str) -> str:
        """What `podman-compose` printed."""
        files = ("-f", str(COMPOSE / "compose.yaml"), "-f", str(SERVERS / "compose.yaml"))
        done = subprocess.run(
            [
                "podman-compose",
                "--in-pod=0",
                "-p",
                PROJECT,
                "--env-file",
                str(self._folder / ".env"),
                *files,
                *arguments,
            ],
            env=self.podman.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, (arguments, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    def has_postgres(self) -> bool:
        """What the file's health check asks."""
        try:
            self.podman.run("healthcheck", "run", f"{PROJECT}_postgres_1")
        except PodmanError:
            time.sleep(POLL_S)
            return False
        return True

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5.0).is_success
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    """The project, which is removed at the end."""
    made = Stack(folder)
    assert not (found := left_behind(made.podman, PROJECT)), f"another project is here: {', '.join(found)}"
    _build_servers(made.podman, folder / "servers")
    try:
        yield made
    finally:
        made.run("--profile", "node", "down", "--volumes")


def _build_servers(podman: Podman, folder: Path) -> None:
    """The image of both servers, from the binaries of this environment's wheels."""
    package = postgres_binary("postgres").parents[2]
    for part in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(part, folder / "wheel" / part.name)
    shutil.copy(valkey_binary(), folder / "valkey-server")
    shutil.copy(SERVERS / "start-postgres", folder)
    base = "BASE=localhost/tidepool-base:bookworm"
    options = ("--isolation=chroot", "--pull=never", "--build-arg", base, "--tag=localhost/tidepool-servers")
    podman.run("build", *options, f"--file={SERVERS / 'Containerfile'}", str(folder))


def test_the_file_resolves(stack: Stack) -> None:
    services = yaml.safe_load(stack.run("--profile", "node", "config"))["services"]
    assert set(services) > PROCESSES
    assert "$" not in str(services)


def test_its_services_stream_an_answer(stack: Stack, figures: list[str]) -> None:
    """As the documentation says, but step by step: podman 4.3 neither waits for the health of a service, nor starts one
    whose dependencies have dependencies.
    """
    models = readable_models(stack.models)
    started_s = time.monotonic()
    stack.run("up", "-d", "postgres", "valkey", "volumes")
    wait_until(stack.has_postgres, "Postgres answers", LIMIT_S)
    stack.run("run", "--rm", "--no-deps", "init")
    keys = {role: stack.run("run", "--rm", "--no-deps", "init", "key", "secret", role).split()[-1] for role in ROLES}
    stack.set(FLEET_KEY=keys["node"])
    stack.run("up", "-d", "--no-deps", "api", "dispatcher", "worker", "forecaster", "beat")
    wait_until(stack.is_ready, "the gateway is ready", LIMIT_S)
    with open_api(stack.url, keys["admin"]) as admin:
        register(admin, models, REGION)
        stack.set(NODE_KEY=node_key(admin, NODE))
    stack.run("--profile", "node", "up", "-d", "--no-deps", "agent")
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=keys["client"], max_retries=0) as client:
        wait_until(lambda: bool(streamed(client)), "an answer is streamed", LIMIT_S)
    figures.append(
        f"compose: first streamed answer {time.monotonic() - started_s:.1f} s after the first `up`, with all steps"
    )


def test_nothing_is_left_of_a_project_that_is_taken_down(stack: Stack) -> None:
    stack.run("--profile", "node", "down", "--volumes")
    assert left_behind(stack.podman, PROJECT) == []
