"""The comparison with vLLM's own server, in vLLM's environment where it was made."""

from pathlib import Path

import pytest

from ops.bench.engine.gpu import VLLM_PYTHON
from ops.bench.engine.node import measure_node
from ops.bench.engine.vllm_serve import MissingVllmError, VllmSetup, check_vllm, measure_vllm
from ops.profiling.checkpoints import Shape, build_checkpoints

TINY = Shape(hidden=128, layers=2, head_dim=32)


def test_an_environment_without_vllm_is_told(tmp_path: Path) -> None:
    with pytest.raises(MissingVllmError, match="make gpu"):
        check_vllm(tmp_path / "python")


@pytest.mark.slow
def test_both_servers_answer_the_same_client(tmp_path: Path) -> None:
    try:
        check_vllm(VLLM_PYTHON)
    except MissingVllmError as error:
        pytest.skip(str(error))
    (model,) = build_checkpoints(tmp_path / "model", [TINY], "float32")
    setup = VllmSetup(python=VLLM_PYTHON, device="cpu", dtype="float32", kv_bytes=2**26, folder=tmp_path)
    rows = measure_vllm(model, setup, loads=[2], draws=1, prompt_tokens=16, max_tokens=8)
    assert [(row["arm"], row["streams"]) for row in rows] == [("tidepool", 2), ("vllm serve", 2)]
    assert all(row["tokens_per_s"] > 0 and row["ttft_s"] > 0 for row in rows)


@pytest.mark.slow
def test_a_node_answers_by_http_while_two_models_take_turns(tmp_path: Path) -> None:
    models = build_checkpoints(tmp_path / "models", [TINY, TINY], "float32")
    found = measure_node(
        models, tmp_path, device="cpu", dtype="float32", loads=[2], draws=1, prompt_tokens=16, max_tokens=8
    )
    assert [row["arm"] for row in found["streams"]] == ["one model", "two models"]
    assert found["greedy_answers_repeated"] == 4
    assert found["switches"] >= 10, "five before each half of the greedy answers, and some of the streams"
    assert found["heartbeats"] > 0
