"""A local stack refuses wrong settings and absent servers before it starts a process."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from ops.client.home import EmbeddedError
from ops.local.ports import free_port
from ops.local.stack import LocalStack


def test_a_wrong_setting_ends_the_start_and_not_the_patience_for_postgres(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEPOOL_SCALE_STRATEGY", "fast")
    with pytest.raises(ValidationError, match="scale_strategy"):
        LocalStack(tmp_path, free_port(), ())
    assert not (tmp_path / "postgres").exists()


def test_a_redis_that_is_away_is_named_by_its_setting(tmp_path: Path) -> None:
    environment = {"TIDEPOOL_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0"}
    with pytest.raises(EmbeddedError, match=r"TIDEPOOL_REDIS_URL does not answer: .*refused"):
        LocalStack(tmp_path, free_port(), (), environment=environment)
