"""Logs without secrets: of a gateway that is used and misused, and of a process that ends."""

import io
import logging
import subprocess
import sys
from contextlib import redirect_stderr
from typing import Any, cast

import pytest
import structlog
from fastapi.testclient import TestClient

from controlplane.api.app import make_app
from controlplane.settings import Settings
from controlplane.store.keys import make_key
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Role
from dataplane.runtime.masked import MaskedStream

SECRET = "tp-client-Xy3q6rT0c1n2m3b4v5c6x7z8a9s0d1f2g3h4j5k6l7q8"


@pytest.fixture
def logged() -> Any:
    """What a process would write to its standard error."""
    written = io.StringIO()
    present = structlog.get_config()
    handler = logging.StreamHandler()
    with redirect_stderr(cast("Any", MaskedStream(written))):
        structlog.configure(
            logger_factory=structlog.PrintLoggerFactory(file=sys.stderr), cache_logger_on_first_use=False
        )
        handler.setStream(sys.stderr)
        logging.getLogger().addHandler(handler)
        yield written
    logging.getLogger().removeHandler(handler)
    structlog.configure(**present)


def test_a_run_with_a_key_logs_none_of_it(
    settings: Settings, logged: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(make_engine(settings))
    with database.transaction() as session:
        secrets = [make_key(session, name="a", role=role, tenant="t").secret for role in (Role.ADMIN, Role.CLIENT)]
    database.close()

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"headers: {{'authorization': 'Bearer {secrets[1]}'}}")

    monkeypatch.setattr("controlplane.store.files.list_files", broken)
    with TestClient(make_app(settings), raise_server_exceptions=False) as api:
        for secret in (*secrets, SECRET):
            headers = {"Authorization": f"Bearer {secret}"}
            for path in ("/v1/files", "/v1/models", "/admin/keys", f"/v1/models/{secret}", f"/v1/files?after={secret}"):
                api.get(path, headers=headers)
        made = api.post(
            "/admin/keys", json={"name": "b", "role": "client"}, headers={"Authorization": f"Bearer {secrets[0]}"}
        )
        secrets.append(made.json()["secret"])
        logging.getLogger("uvicorn.error").error("headers: %s", {"authorization": f"Bearer {secrets[0]}"})
    text = logged.getvalue()
    assert "unhandled error" in text
    assert "***" in text
    for secret in (*secrets, SECRET):
        assert secret not in text


def test_processes_log_masked(settings: Settings) -> None:
    url = f"redis://:{SECRET}@127.0.0.1:9/0"
    code = (
        "import structlog\n"
        "from ops.cli.processes import running\n"
        f"with running(): structlog.get_logger().error('away', url={url!r}); raise OSError({url!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert "redis://:***@127.0.0.1" in done.stderr
    first = done.stderr.splitlines()[0]
    assert SECRET not in first
