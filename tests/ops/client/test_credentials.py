"""Which API and which key a command takes."""

import json
from pathlib import Path

import pytest

from ops.client.credentials import CredentialError, admin_key, api_url, client_key
from ops.client.home import forget_api_url, write_api_url

CLIENT, ADMIN, OPERATOR = "tp-client-c", "tp-admin-a", "tp-operator-o"


@pytest.mark.parametrize(
    ("given", "environment", "url"),
    [
        (None, {}, "http://127.0.0.1:8080"),
        (None, {"TIDEPOOL_PORT": "9000"}, "http://127.0.0.1:9000"),
        (None, {"TIDEPOOL_PORT": "9000", "TIDEPOOL_HOST": "10.0.0.1"}, "http://10.0.0.1:9000"),
        (None, {"TIDEPOOL_HOST": "0.0.0.0"}, "http://127.0.0.1:8080"),
        (None, {"TIDEPOOL_HOST": "fd00::1"}, "http://[fd00::1]:8080"),
        (None, {"TIDEPOOL_TLS_CERT_FILE": "c.pem"}, "https://127.0.0.1:8080"),
        (None, {"TIDEPOOL_PORT": "9000", "TIDEPOOL_URL": "https://api"}, "https://api"),
        ("http://x", {"TIDEPOOL_URL": "https://api"}, "http://x"),
    ],
)
def test_the_address(given: str | None, environment: dict[str, str], url: str, tmp_path: Path) -> None:
    assert api_url(given, {"TIDEPOOL_HOME": str(tmp_path), **environment}) == url


@pytest.mark.parametrize(
    ("given", "environment", "url"),
    [
        (None, {}, "http://127.0.0.1:9123"),
        ("http://x", {}, "http://x"),
        (None, {"TIDEPOOL_URL": "https://api"}, "https://api"),
        (None, {"TIDEPOOL_PORT": "9000"}, "http://127.0.0.1:9000"),
        (None, {"TIDEPOOL_HOST": "10.0.0.1"}, "http://10.0.0.1:8080"),
    ],
)
def test_the_address_that_up_keeps_in_its_home(
    given: str | None, environment: dict[str, str], url: str, tmp_path: Path
) -> None:
    environment["TIDEPOOL_HOME"] = str(tmp_path)
    before = api_url(given, environment)
    write_api_url(tmp_path, "http://127.0.0.1:9123")
    assert api_url(given, environment) == url
    forget_api_url(tmp_path)
    assert api_url(given, environment) == before


def test_an_address_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "api-url").mkdir()
    with pytest.raises(CredentialError, match="api-url cannot be read"):
        api_url(None, {"TIDEPOOL_HOME": str(tmp_path)})


@pytest.mark.parametrize("port", ["x", "0", "65536", "-1"])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(CredentialError, match=f"TIDEPOOL_PORT must be 1 to 65535: '{port}'"):
        api_url(None, {"TIDEPOOL_PORT": port})


@pytest.mark.parametrize(
    ("given", "environment", "kept", "of_admin", "of_client"),
    [
        ("k", {"TIDEPOOL_ADMIN_KEY": ADMIN, "TIDEPOOL_KEY": CLIENT}, "file", ("k", "--key"), ("k", "--key")),
        (
            None,
            {"TIDEPOOL_ADMIN_KEY": ADMIN, "TIDEPOOL_KEY": CLIENT},
            "file",
            (ADMIN, "TIDEPOOL_ADMIN_KEY"),
            (CLIENT, "TIDEPOOL_KEY"),
        ),
        (None, {"TIDEPOOL_KEY": CLIENT}, "file", ("file", "keys.json"), (CLIENT, "TIDEPOOL_KEY")),
        (None, {"TIDEPOOL_KEY": OPERATOR}, "file", (OPERATOR, "TIDEPOOL_KEY"), (OPERATOR, "TIDEPOOL_KEY")),
        (None, {"TIDEPOOL_KEY": CLIENT}, None, (CLIENT, "TIDEPOOL_KEY"), (CLIENT, "TIDEPOOL_KEY")),
        (None, {}, "file", ("file", "keys.json"), ("file", "keys.json")),
    ],
)
def test_the_key(
    given: str | None,
    environment: dict[str, str],
    kept: str | None,
    of_admin: tuple[str, str],
    of_client: tuple[str, str],
    tmp_path: Path,
) -> None:
    if kept is not None:
        (tmp_path / "keys.json").write_text(json.dumps({"admin": kept}))
    here = environment | {"TIDEPOOL_HOME": str(tmp_path)}
    for find, (secret, source) in ((admin_key, of_admin), (client_key, of_client)):
        found = find(given, here)
        assert (found.secret, found.source.removeprefix(f"{tmp_path}/")) == (secret, source)


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "does not exist"), ("{}", "holds no admin key"), ("{", "cannot be read"), ("[]", "must be a JSON object")],
)
def test_no_key(text: str | None, why: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "keys.json").write_text(text)
    with pytest.raises(CredentialError, match=rf"set TIDEPOOL_ADMIN_KEY, or give --key \(.*{why}"):
        admin_key(None, {"TIDEPOOL_HOME": str(tmp_path)})
