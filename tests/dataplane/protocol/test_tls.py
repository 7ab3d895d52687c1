"""TLS of a node: which files are taken, and whom a client believes."""

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from pydantic import ValidationError

from dataplane.protocol.tls import check_tls_files, client_context
from ops.local.ports import free_port
from tests.dataplane.replay_node import settings
from tests.event_loop import asynchronous, until


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority `ca`, its certificate `node` for 127.0.0.1, and another authority `other`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command `openssl`")
    folder = tmp_path_factory.mktemp("tls")

    def make(name: str, *words: str) -> None:
        common = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        argv = [*common, "-keyout", f"{name}.key", "-out", f"{name}.pem", *words]
        subprocess.run(argv, cwd=folder, check=True, capture_output=True, timeout=60)

    for name in ("ca", "other"):
        make(name, "-addext", "keyUsage=critical,keyCertSign")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE")
    make("node", *signed, "-addext", "subjectAltName=IP:127.0.0.1")
    return folder


@asynchronous
async def test_only_who_is_signed_is_believed(files: Path) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    port = free_port()
    config = uvicorn.Config(
        app,
        port=port,
        lifespan="off",
        log_config=None,
        ssl_certfile=files / "node.pem",
        ssl_keyfile=files / "node.key",
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    url = f"https://127.0.0.1:{port}/"
    async with aiohttp.ClientSession() as session:
        async with session.get(url, ssl=client_context(files / "ca.pem")) as answer:
            assert answer.status == 204
        for authorities in (files / "other.pem", None):
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(url, ssl=client_context(authorities))
    server.should_exit = True
    await serving


def test_files_that_cannot_be_used_are_named(files: Path) -> None:
    cert, key, wrong = files / "node.pem", files / "node.key", files / "missing.pem"
    check_tls_files(None, None, None)
    check_tls_files(cert, key, files / "ca.pem")
    for given, why in (
        ((cert, None, None), "must be set together"),
        ((None, key, None), "must be set together"),
        ((cert, files / "other.key", None), "cannot be used: .*mismatch"),
        ((wrong, key, None), "missing.pem .*cannot be used"),
        ((None, None, wrong), "tls_ca_file .*missing.pem cannot be used"),
        ((None, None, key), "tls_ca_file .*node.key cannot be used"),
    ):
        with pytest.raises(ValueError, match=why):
            check_tls_files(*given)


def test_settings_refuse_them(files: Path) -> None:
    with pytest.raises(ValidationError, match="tls_cert_file and tls_key_file must be set together"):
        settings(tls_cert_file=files / "node.pem")
