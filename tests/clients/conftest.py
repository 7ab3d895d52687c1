"""Other people's clients before a whole stack, each in an environment of its own: `make test-clients`.

`CLIENTS` names those that are installed, in `.clients/NAME`; without it every test here says that it was skipped.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ops.local.sample_fleet import POOL_REGION, TOKENS_PER_S
from ops.local.stack import LocalStack
from ops.local.word_tokenizer import write_word_tokenizer
from tests.flows.checkpoints import checkpoint_stack, embedding_model, tool_model
from tests.flows.conftest import REPLAY_NODES, admin_of, client_of, register, replay_stack, wait_ready
from tests.flows.waiting import wait_until

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
MODEL = "tide"
CONTEXT_TOKENS = 4096
PATIENCE_S = 550.0
INSTALLED = os.environ.get("CLIENTS", "").split()
NOT_HERE = "clients have environments of their own: make test-clients"


@dataclass(frozen=True, kw_only=True)
class Service:
    """Where the stack is, a client's key, and the tokenizer that its model has."""

    url: str
    key: str
    tokenizer: Path
    model: str = MODEL
    embedder: str = ""


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One region, one replayed node, one model; its tokenizer has a token for each word."""
    if not INSTALLED:
        pytest.skip(NOT_HERE)
    folder = write_word_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    with replay_stack(tmp_path_factory.mktemp("clients"), REPLAY_NODES[:1]) as stack:
        _register(stack, folder)
        yield Service(url=stack.url, key=stack.keys["client"], tokenizer=folder)


@pytest.fixture(scope="session")
def tool_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One region, one node with the torch engine; a model that can be made to call tools, and one that embeds."""
    if not INSTALLED:
        pytest.skip(NOT_HERE)
    folder = tmp_path_factory.mktemp("models")
    folders = {"tiny-qwen3": tool_model(folder, "tiny-qwen3"), "tiny-embedder": embedding_model(folder)}
    with checkpoint_stack(tmp_path_factory.mktemp("tools"), folders) as stack:
        yield Service(
            url=stack.url,
            key=stack.keys["client"],
            tokenizer=folders["tiny-qwen3"],
            model="tiny-qwen3",
            embedder="tiny-embedder",
        )


def _register(stack: LocalStack, folder: Path) -> None:
    about = {"path": str(folder), "architecture": "Replay", "weights_bytes": 1 << 20, "kv_bytes_per_token": 512}
    with admin_of(stack) as admin:
        register(admin, (), (POOL_REGION,))
        admin.put(f"/admin/models/{MODEL}", about | {"context_tokens": CONTEXT_TOKENS})
        gpu_type = POOL_REGION.gpu_type
        profile = {"tokens_per_s": TOKENS_PER_S[gpu_type], "gpus": 1, "load_time_s": 1.0}
        admin.put("/admin/profiles", {"model": MODEL, "gpu_type": gpu_type, **profile})
        limits = {"instances_min": 1, "instances_max": 4}
        admin.put("/admin/endpoints", {"model": MODEL, "region": POOL_REGION.name, **limits})
        wait_ready(admin, 1)
    with client_of(stack) as client:
        wait_until(lambda: client.models.retrieve(MODEL).id == MODEL, "the gateway knows the model")


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(service: Service, tmp_path: Path) -> Run:
    """See `_run`, for the service that replays."""
    return _run(service, tmp_path)


@pytest.fixture
def run_tools(tool_service: Service, tmp_path: Path) -> Run:
    """See `_run`, for the service with a model that calls tools."""
    return _run(tool_service, tmp_path)


def _run(service: Service, tmp_path: Path) -> Run:
    """`run(client, command, *arguments)`: a finished command of a client's environment, in an empty folder. It sees
    the stack as TIDEPOOL_TEST_{URL,KEY,MODEL,EMBEDDER}, its own environment as TIDEPOOL_TEST_MODULES, and no other
    settings.
    """

    def run(client: str, command: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        if client not in INSTALLED:
            pytest.skip(NOT_HERE)
        home = ROOT / ".clients" / client
        found = shutil.which(command) if command == "node" else str(home / "bin" / command)
        if found is None or (command == "node" and not (home / "node_modules").is_dir()):
            pytest.skip("there was no Node.js with npm on this machine")
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        told = {
            "TIDEPOOL_TEST_URL": service.url,
            "TIDEPOOL_TEST_KEY": service.key,
            "TIDEPOOL_TEST_MODEL": service.model,
        }
        told |= {"TIDEPOOL_TEST_EMBEDDER": service.embedder}
        told |= {"TIDEPOOL_TEST_MODULES": str(home), "PYTHONWARNINGS": "ignore"}
        return subprocess.run(
            [found, *arguments],
            cwd=tmp_path,
            env={"HOME": str(tmp_path), "TMPDIR": str(tmp_path)} | kept | told | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    return run


def told_by(finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object that a program printed last."""
    assert finished.returncode == 0, finished.stdout + finished.stderr
    told: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    return told
