"""Servers for the whole session, started when first asked for. Under pytest-xdist each worker has its own."""

import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey
from ops.local.ports import free_port
from ops.local.supervisor import Supervisor

# The same examples in every run; `HYPOTHESIS_PROFILE=searching` looks further. Neither judges a loaded machine's speed.
settings.register_profile("reproducible", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("searching", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "reproducible"))

# Without a GPU kernels are interpreted. It counts when Triton is imported.
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

LEFT_OUT = pytest.StashKey[int]()
"""Tests that `-m` or `-k` left out."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = 0


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    if items:
        items[0].config.stash[LEFT_OUT] += len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells its controller, which deselects nothing itself."""
    if isinstance(output := getattr(session.config, "workeroutput", None), dict):
        output["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """pytest counts them for a run without workers only. The line stands last, where it is seen."""
    yield
    if left_out := config.stash[LEFT_OUT]:
        terminalreporter.write_line(f"{left_out} tests were left out; `make test-all` runs every test.", yellow=True)


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SQLAlchemy's address of an empty database; TIDEPOOL_TEST_DATABASE_URL if that is set."""
    if url := os.environ.get("TIDEPOOL_TEST_DATABASE_URL"):
        yield url
        return
    server = EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), free_port(), fsync=False)
    server.prepare()
    with Supervisor([server.child()]):
        yield server.url()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an empty Redis; TIDEPOOL_TEST_REDIS_URL if that is set."""
    if url := os.environ.get("TIDEPOOL_TEST_REDIS_URL"):
        yield url
        return
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"), free_port())
    server.prepare()
    with Supervisor([server.child()]):
        yield server.url()
