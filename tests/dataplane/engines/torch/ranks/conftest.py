"""Engines of several ranks, of which a module's tests share one."""

from typing import Any

import pytest

from tests.dataplane.engines.torch.rank_engines import engine_of


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    engine = engine_of(2, tmp_path_factory.mktemp("two"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Any:
    engine = engine_of(4, tmp_path_factory.mktemp("four"))
    yield engine
    engine.close()
