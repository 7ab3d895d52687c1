"""`tidepool --version`."""

import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from ops import version as of_version
from ops.cli import main


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert shown.startswith(f"tidepool {version('tidepool')}")
    assert shown.endswith(f"Python {platform.python_version()}\n")


def test_the_revision_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_version._revision(tmp_path) is None, "an installed package has none"
    (tmp_path / ".git").mkdir()
    assert of_version._revision(tmp_path) is None, "a folder that git does not know"
    monkeypatch.setenv("PATH", "")
    assert of_version._revision(Path(of_version.__file__).parents[1]) is None, "no git"
