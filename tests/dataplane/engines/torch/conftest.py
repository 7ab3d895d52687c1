from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dataplane.engines.torch.tiny import save_tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an architecture's tiny checkpoint, written when first asked for."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(architecture: str) -> Path:
        target = root / architecture
        return target if target.exists() else save_tiny(architecture, target)

    return folder
