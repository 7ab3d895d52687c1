"""The files of the home folder, as they are and damaged."""

from pathlib import Path

import pytest

from ops.client.home import EmbeddedError, password, read_secrets, remember, remembered_port


def test_a_server_keeps_its_password_when_its_port_changes(tmp_path: Path) -> None:
    assert remembered_port(tmp_path, "postgres") is None
    remember(tmp_path, "postgres", 5432)
    secret = password(tmp_path, "postgres")
    remember(tmp_path, "valkey", 6379)
    remember(tmp_path, "postgres", 5433)
    assert (remembered_port(tmp_path, "postgres"), password(tmp_path, "postgres")) == (5433, secret)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"{", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "must be a JSON object"),
        (b'{"postgres": 5432}', "must be a JSON object"),
        (b'{"postgres": {"port": "5432", "password": "x"}}', "must be a JSON object"),
        (b'{"postgres": {"port": 5432}}', "must be a JSON object"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: bytes, fault: str) -> None:
    for name in ("embedded.json", "keys.json"):
        (tmp_path / name).write_bytes(text)
    with pytest.raises(EmbeddedError, match=f"embedded.json {fault}"):
        remembered_port(tmp_path, "postgres")
    with pytest.raises(EmbeddedError, match=f"embedded.json {fault}"):
        remember(tmp_path, "postgres", 5432)
    with pytest.raises(EmbeddedError, match=f"keys.json {fault}"):
        read_secrets(tmp_path)
