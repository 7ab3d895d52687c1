"""The command line in this process, without an API and with one."""

import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import uvicorn

from controlplane.api.app import make_app
from controlplane.settings import Settings
from controlplane.store.keys import make_key
from controlplane.store.session import Database
from controlplane.store.tables import Role
from ops.cli.main import main
from tests.ops.cli.running import Outcome, Run
from tests.ops.local.test_checkpoints import write_checkpoint

WAIT_S = 30.0


@pytest.fixture
def restored_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For commands that set up logging for a process of their own: afterwards it is as before, so that no later test
    writes to this one's standard error.
    """
    for module in (sys, threading):
        monkeypatch.setattr(module, "excepthook", module.excepthook)
    present, handlers = structlog.get_config(), list(logging.root.handlers)
    yield
    logging.captureWarnings(capture=False)
    structlog.configure(**present)
    for handler in [each for each in logging.root.handlers if each not in handlers]:
        logging.root.removeHandler(handler)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """A command in this process, with a wide screen and an empty home."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TIDEPOOL_HOME", str(tmp_path))
    for name in ("TIDEPOOL_URL", "TIDEPOOL_PORT", "TIDEPOOL_HOST", "TIDEPOOL_KEY", "TIDEPOOL_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(status=int(ended.value.code or 0), out=captured.out, err=captured.err)

    return run


@pytest.fixture
def served(settings: Settings, database: Database, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run` with a real API behind it; its admin key is in the home's keys.json."""
    with database.transaction() as session:
        secret = make_key(session, name="admin", role=Role.ADMIN, tenant="default").secret
    (settings.home / "keys.json").write_text(json.dumps({"admin": secret}))
    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("TIDEPOOL_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    server = uvicorn.Server(uvicorn.Config(make_app(settings), log_level="error", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()  # the socket listens already: a request waits until the server accepts it
    yield run
    server.should_exit = True
    thread.join(WAIT_S)
    listener.close()


@pytest.fixture
def fleet(served: Run, tmp_path: Path) -> Run:
    """`served` with the region us-east, the GPU type H800, and the model `m`, which is offered there."""
    served("region", "add", "us-east")
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder = write_checkpoint(tmp_path / "tiny")
    added = served("model", "add", "m", "--path", folder, "--tokens-per-s", "H800=1200", "--region", "us-east")
    assert added.status == 0, added.err
    return served
