"""Constrained answers of vLLM: by the same oracle as the torch engine's, and token for token the same."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.messages import Constraint
from ops.local.tiny_models import build_tiny_models
from tests.dataplane.constraints.answers import answers, asked, check_schemas, schema_constraint, spec
from tests.dataplane.constraints.schemas import own_schemas

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

SCHEMA = {
    "type": "object",
    "properties": {"größe": {"type": "integer"}, "names": {"type": "array", "items": {"enum": ["a", "ü"]}}},
    "required": ["größe", "names"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_models(tmp_path_factory.mktemp("models"), ["tiny-llama"])[0].path


def test_answers_match_schemas_and_go_on_after_a_cut(make_engine: Callable[..., Any], folder: Path) -> None:
    engine = make_engine(weights_bytes=2**24, kv_bytes=2**26, batch_max=32)
    engine.load("a", spec(folder))
    counted = check_schemas(engine, folder, own_schemas(60), max_tokens=60)
    assert counted["stop"] + counted["stop after a cut"] > 30, counted


def test_the_same_tokens_as_the_torch_engine(make_engine: Callable[..., Any], folder: Path) -> None:
    requests = [
        asked(0, schema_constraint(SCHEMA), max_tokens=200),
        asked(1, Constraint(kind="choice", definition='["yes", "no"]'), ignore_eos=True),
        asked(2, Constraint(kind="regex", definition="[0-9]{3}[a-z]*"), min_tokens=6, frequency_penalty=0.5),
        asked(3, schema_constraint(SCHEMA), temperature=0.0),
        asked(4, Constraint(kind="json_object", after="<|user|>", opening="<|system|>")),
    ]
    ours = TorchEngine(TorchEngineSettings(weights_bytes=2**24, kv_bytes=2**24), time.monotonic)
    ours.load("a", spec(folder))
    expected = answers(ours, folder, requests)
    ours.close()
    engine = make_engine(weights_bytes=2**24, kv_bytes=2**26)
    engine.load("a", spec(folder))
    assert answers(engine, folder, requests) == expected
    [rest] = answers(
        engine, folder, [asked(0, schema_constraint(SCHEMA), generated=expected[0].tokens[:9], max_tokens=200)]
    )
    assert rest.tokens == expected[0].tokens[9:]
    [foreign] = answers(engine, folder, [asked(5, schema_constraint(SCHEMA), generated=(300,))])
    assert foreign.error is not None
    assert "does not match its constraint" in foreign.error
