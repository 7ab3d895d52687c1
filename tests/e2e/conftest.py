"""The chart and the compose file in containers of podman. `make e2e-chart` installs what that needs."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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


@pytest.fixture(scope="session")
def open_folder() -> Callable[[Path], Path]:
    """Lets every user read pytest's folder of a name: pods are another user, and find their checkpoints there."""

    def open_to_all(folder: Path) -> Path:
        for path in (folder, *folder.parents[:2]):
            path.chmod(0o755)
        return folder

    return open_to_all


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory, open_folder: Callable[[Path], Path]) -> Iterator[Release]:
    """The chart's release, until the last test."""
    with installed(open_folder(tmp_path_factory.mktemp("release"))) as made:
        yield made
