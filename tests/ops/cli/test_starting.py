"""What keeps a process from starting is one line that names the setting, at once and without a traceback."""

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.settings import Settings
from ops.local.ports import free_port
from ops.local.stack import lock_home
from tests.ops.cli.running import Run

FILE_BYTES_MAX = 2**18
"""Less than the weights of a tiny model."""


@pytest.fixture(autouse=True)
def _quiet(restored_logs: None) -> None:
    """Each of these commands sets up logging."""


def refused(run: Run, *arguments: object) -> str:
    ended = run(*arguments)
    assert ended.status == 1, ended
    assert ended.err.startswith("error: "), ended.err
    assert ended.err.count("\n") == 1, ended.err
    return ended.err


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("TIDEPOOL_SCALE_STRATEGY", "fast", "setting TIDEPOOL_SCALE_STRATEGY: String should match pattern"),
        ("TIDEPOOL_DATABASE_URL", "mysql://x", "setting TIDEPOOL_DATABASE_URL: must be postgresql://"),
        ("TIDEPOOL_REDIS_URL", "http://x", "setting TIDEPOOL_REDIS_URL: must be redis://"),
        ("TIDEPOOL_OIDC_ROLES", "admins", "setting TIDEPOOL_OIDC_ROLES: must be JSON"),
    ],
)
def test_up_names_a_wrong_setting_before_it_makes_anything(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str, value: str, said: str
) -> None:
    monkeypatch.setenv(setting, value)
    assert said in refused(run, "up", "--tiny", "--port", free_port())
    assert list(tmp_path.iterdir()) == []


def test_up_names_the_option_of_a_port_that_is_taken(run: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        said = refused(run, "up", "--tiny", "--port", port)
    assert f"port {port} cannot be used (Address already in use)" in said
    assert "--port or TIDEPOOL_PORT" in said
    assert not (tmp_path / "models").exists()


def test_up_names_the_home_that_cannot_be_made(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refused(run, "up", "--tiny", "--port", free_port(), "--home", tmp_path / "file" / "home")
    assert "(TIDEPOOL_HOME) cannot be made" in said


@pytest.fixture
def small_files() -> Iterator[None]:
    """No process may write larger files, as on a full disk. Python ignores the signal that comes with the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_up_names_the_home_that_is_full(run: Run, small_files: None) -> None:
    assert "(TIDEPOOL_HOME): " in refused(run, "up", "--tiny", "--port", free_port())


@pytest.mark.parametrize(
    ("command", "setting", "value"),
    [
        ("agent", "TIDEPOOL_AGENT_SLOTS", "abc"),
        *((command, "TIDEPOOL_OIDC_ROLES", "admins") for command in ("api", "migrate", "doctor")),
    ],
)
def test_a_setting_that_is_no_json_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, setting: str, value: str
) -> None:
    monkeypatch.setenv(setting, value)
    assert f"setting {setting}: must be JSON" in refused(run, command)


@pytest.mark.parametrize("address", ["http://x", "redis://h:notaport", "redis://:hid/den@h:6379", "unix:///run/redis"])
def test_an_address_of_redis_is_checked_and_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("TIDEPOOL_REDIS_URL", address)
    said = refused(run, "api")
    assert "setting TIDEPOOL_REDIS_URL: must be redis://" in said
    assert "hid" not in said


def test_an_empty_address_of_redis_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEPOOL_REDIS_URL", "")
    assert Settings().redis_url == Settings.model_fields["redis_url"].default


def test_up_names_the_home_where_a_stack_of_regions_runs(run: Run, tmp_path: Path) -> None:
    region = tmp_path / "regions" / "us-east"
    region.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as listener, lock_home(region):
        said = refused(run, "up", "--tiny", "--port", listener.getsockname()[1])
    assert f"another Tidepool runs on {tmp_path}" in said


@pytest.mark.parametrize(("command", "prefix"), [("api", "TIDEPOOL_"), ("agent", "TIDEPOOL_AGENT_")])
def test_settings_that_do_not_go_together_are_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, prefix: str
) -> None:
    agent = {"NODE": "n", "REGION": "r", "GPU_TYPE": "g", "SLOTS": '[{"memory_bytes": 2000000}]', "NODE_KEY": "k" * 8}
    for name, value in (agent if command == "agent" else {}).items():
        monkeypatch.setenv(f"{prefix}{name}", value)
    monkeypatch.setenv(f"{prefix}TLS_CERT_FILE", "/absent/tls_cert_file.pem")
    told = f"settings: {prefix}TLS_CERT_FILE and {prefix}TLS_KEY_FILE must be set together"
    assert told in refused(run, command)
    monkeypatch.setenv(f"{prefix}TLS_KEY_FILE", "/absent/key.pem")
    told = f"settings: {prefix}TLS_CERT_FILE /absent/tls_cert_file.pem and {prefix}TLS_KEY_FILE /absent/key.pem cannot"
    assert told in refused(run, command)
