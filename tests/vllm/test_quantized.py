"""vLLM reads quantized checkpoints as the torch engine does: the two agree about what the packed numbers mean.

It wants bfloat16 for these, and its kernels for CPUs round differently from machine to machine. So scores are compared,
not tokens, of a model whose layers do not amplify what is rounded.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dataplane.protocol.errors import ModelLoadError
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.model.packing import AWQ, GPTQ, Pack, awq, gptq, quantized_pair
from tests.dataplane.engines.torch.tiny import save_tiny, spec_of, token_logprobs
from tests.vllm.conftest import HEAD_DIM

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

GROUP = 128
"""vLLM's kernels for CPUs know this one."""
PROMPT = [5, 9, 33, 60, 12]
TOKENS = 24


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 8 * HEAD_DIM, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    return save_tiny("llama", tmp_path_factory.mktemp("dense"), head_dim=HEAD_DIM, initializer_range=0.08, **sizes)


@pytest.mark.parametrize(
    ("config", "pack"), [(AWQ, awq(GROUP)), (GPTQ | {"sym": True}, gptq(4, GROUP, symmetric=True))], ids=["awq", "gptq"]
)
def test_scores_are_those_of_the_weights_that_a_checkpoint_stands_for(
    config: dict[str, Any], pack: Pack, dense: Path, make_engine: Callable[..., Any], tmp_path: Path
) -> None:
    quantized, meant = quantized_pair(dense, tmp_path, config | {"group_size": GROUP}, pack)
    engine = make_engine(dtype="bfloat16", weights_bytes=10**8, kv_bytes=2**22)
    engine.load("a", spec_of("model", quantized))
    engine.add(request("one", PROMPT, max_tokens=TOKENS, logprobs=1, ignore_eos=True))
    made = drain(engine)
    tokens, scores = made.tokens["one"], [score.logprob for score in made.scores["one"]]
    assert len(scores) == TOKENS

    def error(folder: Path) -> float:
        expected = token_logprobs(folder, PROMPT, tokens)
        return fmean(abs(one - other) for one, other in zip(scores, expected, strict=True))

    assert error(meant) < error(dense) / 4, "nearer than the weights it was made of, which are 4 bits away"


def test_what_vllm_does_not_take_is_refused_with_its_words(
    dense: Path, make_engine: Callable[..., Any], tmp_path: Path
) -> None:
    quantized, _ = quantized_pair(dense, tmp_path, GPTQ | {"group_size": GROUP}, gptq(4, GROUP))
    engine = make_engine(dtype="bfloat16", weights_bytes=10**8, kv_bytes=2**22)
    with pytest.raises(ModelLoadError, match="Unsupported quantization config: bits=4, sym=False"):
        engine.load("a", spec_of("model", quantized))
