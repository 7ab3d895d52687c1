from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dataplane.engines.interface import EngineRequest
from tests.dataplane.engines.torch.deep import LAYERS, Deep, Undisturbed, loaded, slot
from tests.dataplane.engines.torch.drive import drain
from tests.dataplane.engines.torch.tiny import save_tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an architecture's tiny checkpoint, written when first asked for."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(architecture: str) -> Path:
        target = root / architecture
        return target if target.exists() else save_tiny(architecture, target)

    return folder


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Deep:
    """The folder of an architecture's checkpoint with `LAYERS` layers."""
    root = tmp_path_factory.mktemp("deep")

    def folder(name: str) -> Path:
        target = root / name
        return target if target.exists() else save_tiny(name, target, num_hidden_layers=LAYERS)

    return folder


@pytest.fixture(scope="session")
def undisturbed(deep: Deep) -> Undisturbed:
    """Tokens by request: one request at a time on a slot that is large enough. The same question is asked once."""
    known: dict[tuple[str, tuple[int, ...], int], tuple[int, ...]] = {}

    def tokens(requests: Sequence[EngineRequest]) -> dict[str, tuple[int, ...]]:
        questions = {one.request_id: (one.instance_id, one.prompt, one.max_tokens) for one in requests}
        new = [one for one in requests if questions[one.request_id] not in known]
        for name in sorted({one.instance_id for one in new}):
            engine = loaded(deep, [name], slot(deep, [name], models_there=1, kv_pressure="swap"))
            for one in (one for one in new if one.instance_id == name):
                engine.add(one)
                known[questions[one.request_id]] = drain(engine).tokens[one.request_id]
            engine.close()
        return {request_id: known[question] for request_id, question in questions.items()}

    return tokens
