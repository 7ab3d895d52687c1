"""`tidepool --version`."""

import platform
from importlib.metadata import version
from pathlib import Path

import pytest

import ops
from ops.cli.main import main
from ops.version import revision_of


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert shown.startswith(f"tidepool {version('tidepool')}")
    assert shown.endswith(f"Python {platform.python_version()}\n")


def test_the_revision_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert revision_of(tmp_path) is None, "an installed package has none"
    (tmp_path / ".git").mkdir()
    assert revision_of(tmp_path) is None, "a folder that git does not know"
    monkeypatch.setenv("PATH", "")
    assert revision_of(Path(ops.__file__).parents[1]) is None, "no git"
