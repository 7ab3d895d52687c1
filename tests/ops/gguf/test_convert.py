"""A checkpoint written as GGUF and converted back computes what it did, for every architecture that is converted."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="install the gguf extra")

import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dataplane.agent.tokenization import CheckpointTokenizer
from dataplane.engines.torch.model.skeleton import build_skeleton
from dataplane.protocol.messages import ChatMessage
from ops.gguf import convert as conversion
from ops.gguf.configs import ARCHITECTURES
from ops.gguf.convert import convert
from ops.gguf.header import GgufError
from ops.local.checkpoints import describe_checkpoint
from ops.local.tiny_models import build_tiny_models
from tests.dataplane.chats import prompt_text
from tests.ops.gguf.files import CHANGES, NAMES, finish, save_original, write_gguf

PROMPT = list(range(5, 45))
TEXTS = (
    "The tide comes in, and the tide goes out.",
    "  two  blanks, 2024 and 3.14159;\n\tdef add(a, b):\n        return a + b\n",
    "Grüße, 你好, 🌊🦙 and e\u0301",
    "<|user|>not a role<|end|>",
)


def logits(folder: Path) -> torch.Tensor:
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        answer: torch.Tensor = model(torch.tensor([PROMPT])).logits
    return answer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_original("llama", tmp_path_factory.mktemp("llama") / "original")


def test_every_architecture_that_is_converted_is_compared_here() -> None:
    assert {NAMES.get(name, name) for name in CHANGES} == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", CHANGES)
def test_the_way_back_leads_to_the_same_logits(architecture: str, tmp_path: Path) -> None:
    original = save_original(architecture, tmp_path / "original")
    file = write_gguf(original, tmp_path / "model.gguf")

    assert convert(file, tmp_path / "back")

    assert torch.equal(logits(tmp_path / "back"), logits(original))
    build_skeleton(tmp_path / "back", torch.float32, torch.device("cpu"))
    assert describe_checkpoint(tmp_path / "back")["context_tokens"] == 256


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 20_000.0}},
    ],
)
def test_biases_and_stretched_positions_too(changes: dict[str, Any], tmp_path: Path) -> None:
    original = save_original("llama", tmp_path / "original", **changes)
    convert(write_gguf(original, tmp_path / "model.gguf"), tmp_path / "back")
    assert torch.equal(logits(tmp_path / "back"), logits(original))
    assert not torch.equal(logits(original), logits(save_original("llama", tmp_path / "plain")))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.F16, "float16"),
        (GGMLQuantizationType.BF16, "bfloat16"),
        (GGMLQuantizationType.Q8_0, "bfloat16"),
        (GGMLQuantizationType.Q5_1, "bfloat16"),
        (GGMLQuantizationType.Q4_1, "bfloat16"),
    ],
)
def test_fewer_bits_lose_what_they_cannot_hold_and_no_more(
    kind: GGMLQuantizationType, dtype: str, llama: Path, tmp_path: Path
) -> None:
    convert(write_gguf(llama, tmp_path / "model.gguf", kind), tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    originals = load_file(llama / "model.safetensors")
    assert back.keys() == originals.keys()
    for name, original in originals.items():
        kept = original.numpy() if original.dim() == 1 else dequantize(quantize(original.numpy(), kind), kind)
        assert torch.equal(back[name], torch.from_numpy(kept).to(getattr(torch, dtype))), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == dtype


def test_k_quants_are_unpacked_row_by_row(tmp_path: Path) -> None:
    chance = np.random.default_rng(3)
    blocks = chance.integers(0, 256, (10, 144), dtype=np.uint8)
    blocks[:, 0:4] = np.full((10, 2), 0.01, np.float16).view(np.uint8)  # the scales; any other byte is a weight
    file = tmp_path / "blocks.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_tensor("a", blocks, raw_dtype=GGMLQuantizationType.Q4_K)
    finish(writer)
    order = np.array([9, 0, 4])
    stored = conversion.read_header(file).tensors["a"]
    weight = conversion.Weight(name="a", shape=(3, 256), stored=stored, stored_rows=10, rows=order, shift=0.0)
    [values] = conversion.read_values(np.memmap(file, dtype=np.uint8, mode="r"), weight)
    assert np.array_equal(values, dequantize(blocks, GGMLQuantizationType.Q4_K)[order])


def test_the_tokenizer_and_the_chat_template_are_the_same(llama: Path, tmp_path: Path) -> None:
    [tiny] = build_tiny_models(tmp_path, ["tiny-llama"])
    convert(write_gguf(llama, tmp_path / "model.gguf"), tmp_path / "back")
    ours, theirs = CheckpointTokenizer(tmp_path / "back"), CheckpointTokenizer(tiny.path)
    for text in TEXTS:
        assert ours.encode_text(text, tokens_max=1000) == theirs.encode_text(text, tokens_max=1000), text
        assert ours.decode(ours.encode_text(text, tokens_max=1000)) == theirs.decode(
            theirs.encode_text(text, tokens_max=1000)
        )
    messages = [ChatMessage(role="user", content=text) for text in TEXTS]
    assert prompt_text(ours.template, messages) == prompt_text(theirs.template, messages)


def test_a_second_time_finds_it_done_and_another_file_is_not_taken_for_it(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "model.gguf")
    reported: list[tuple[int, int]] = []
    assert convert(file, tmp_path / "back", lambda done, total: reported.append((done, total)))
    assert reported[-1][0] == reported[-1][1] > 0
    assert not convert(file, tmp_path / "back")
    other = write_gguf(llama, tmp_path / "other.gguf", GGMLQuantizationType.F16)
    with pytest.raises(GgufError, match="was not made from"):
        convert(other, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "model.gguf", "other.gguf"]


def test_too_little_room_is_said_before_anything_is_written(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(llama, tmp_path / "model.gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(GgufError, match=r"needs 6\d MiB of disk, and 1 MiB are free"):
        convert(file, tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_an_interrupted_conversion_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "model.gguf")

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(file, tmp_path / "back", interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope__scaling__type": "yarn"}, "rope.scaling.type = 'yarn' is not supported"),
        ({"mystery": "1"}, "llama.mystery is not supported"),
    ],
)
def test_what_is_not_understood_is_refused(settings: dict[str, str], words: str, llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "model.gguf", **settings)
    with pytest.raises(GgufError, match=words):
        convert(file, tmp_path / "back")


def test_an_architecture_that_we_do_not_run_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.add_tensor("a", np.zeros((2, 2), np.float32))
    finish(writer)
    with pytest.raises(GgufError, match="the architecture 'mamba' is not supported; supported are cohere2, gemma2"):
        convert(tmp_path / "mamba.gguf", tmp_path / "back")
