from pathlib import Path

import pytest

from ops.local.tiny_models import build_tiny_models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a demo model: real architecture and tokenizer, random weights."""
    return build_tiny_models(tmp_path_factory.mktemp("models"), ["tiny-llama"])[0].path
