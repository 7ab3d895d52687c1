from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataplane.engines.interface import Engine
from tests.contracts.engines import ENGINES, Subject


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints are written once for the whole suite."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module", params=ENGINES, ids=lambda factory: factory.__name__.removesuffix("_subject"))
def factory(request: pytest.FixtureRequest) -> Callable[..., Subject]:
    """One engine's."""
    made: Callable[..., Subject] = request.param
    return made


@pytest.fixture
def subject(factory: Callable[..., Subject], checkpoints: Path) -> Iterator[Subject]:
    made = factory(checkpoints)
    yield made
    made.close()


@pytest.fixture
def engine(subject: Subject) -> Engine:
    """The subject's engine with instance "a" of the first model."""
    subject.engine.load("a", subject.models[0])
    return subject.engine
