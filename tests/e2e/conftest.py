"""The chart and the compose file in containers of podman. `make e2e-chart` installs what that needs."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.release import Release, installed

NOT_HERE = "containers have a target of their own: make e2e-chart"
FIGURES = pytest.StashKey[list[str]]()
"""What the tests measured, printed at the end."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not os.environ.get("TIDEPOOL_TEST_CONTAINERS"):
            item.add_marker(pytest.mark.skip(reason=NOT_HERE))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[FIGURES]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> list[str]:
    """Lines to print at the end."""
    return request.config.stash[FIGURES]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own: servers and pods are other users."""
    with TemporaryDirectory(prefix="tidepool-e2e-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="module")
def release(folder: Path) -> Iterator[Release]:
    """The chart's release, until the last test."""
    with installed(folder) as made:
        yield made
