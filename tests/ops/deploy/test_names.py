"""Deployment files use settings and commands that exist."""

import re
from pathlib import Path

import pytest

from ops.cli.unknown_settings import unknown_settings
from tests.ops.deploy.commands import fault_of_command

DEPLOY = Path(__file__).parents[3] / "ops/deploy"
FOLDERS = ("systemd", "helm", "compose")


def _files(folder: str) -> list[Path]:
    return [path for path in (DEPLOY / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_variable_is_a_setting(folder: str) -> None:
    named = {name for path in _files(folder) for name in re.findall(r"\bTIDEPOOL_[A-Z0-9_]+", path.read_text())}
    assert len(named) > 5
    assert unknown_settings(named) == []


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["api", "--processes", "4"], None),
        (["init", "--migrate"], None),
        (["key", "list"], None),
        (["gateway"], "gateway"),
        (["key", "lose"], "lose"),
        (["api", "--prozesses", "4"], "prozesses"),
        (["api", "--processes", "100"], "64"),
    ],
)
def test_a_command_that_is_none_is_found(arguments: list[str], fault: str | None) -> None:
    found = fault_of_command(arguments)
    assert found is None if fault is None else fault in (found or "")
