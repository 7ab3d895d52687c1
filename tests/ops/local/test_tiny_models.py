"""The demo models: same bytes every time, whole or not at all, and fit for a newcomer's eyes."""

import hashlib
import json
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.model.skeleton import build_skeleton
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.memory.slabs import ALIGNMENT_BYTES
from dataplane.protocol.messages import ModelSpec
from ops.local.checkpoints import describe_checkpoint
from ops.local.tiny_models import RECIPES, VOCABULARY, build_tiny_models, printable_ids, train_tokenizer
from tests.dataplane.engines.torch.drive import drain, request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models")
    build_tiny_models(target)
    return target


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_two_builds_are_byte_identical(folder: Path, tmp_path: Path) -> None:
    made = build_tiny_models(tmp_path / "again")
    assert [model.name for model in made] == list(RECIPES)
    assert hashes(tmp_path / "again") == hashes(folder)
    assert len(hashes(folder)) == 6 * len(RECIPES)


def test_building_again_touches_nothing(folder: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    build_tiny_models(folder)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


def test_an_interrupted_or_damaged_build_is_repaired(folder: Path, tmp_path: Path) -> None:
    build_tiny_models(tmp_path, ["tiny-llama"])
    whole = hashes(tmp_path)
    weights = tmp_path / "tiny-llama" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (tmp_path / ".tiny-llama.partial").mkdir()
    build_tiny_models(tmp_path, ["tiny-llama"])
    assert hashes(tmp_path) == whole
    rmtree(tmp_path / "tiny-llama")
    (tmp_path / "tiny-llama").mkdir()
    build_tiny_models(tmp_path, ["tiny-llama"])
    assert hashes(tmp_path) == whole


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown tiny model 'tiny-gpt'; there are tiny-llama, "):
        build_tiny_models(tmp_path, ["tiny-gpt"])


def test_they_are_of_several_architectures_and_a_few_megabytes(folder: Path) -> None:
    configs = [json.loads((folder / name / "config.json").read_text()) for name in RECIPES]
    assert len({config["model_type"] for config in configs}) == 8
    for name in RECIPES:
        assert 5e6 < (folder / name / "model.safetensors").stat().st_size < 8e6
        config = AutoConfig.from_pretrained(folder / name)
        assert config.num_hidden_layers == RECIPES[name].shape.layers
        assert config.rope_parameters


@pytest.mark.parametrize("text", ["Hello, tide!", "naïve 🌊 漢字", "\x00\x7f\ttab\r\n", "<|end|>"])
def test_any_text_survives_the_tokenizer(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tiny-llama" / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_is_a_token() -> None:
    tokenizer = train_tokenizer()
    for byte in range(256):
        text = bytes([byte]).decode("latin-1")
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(bytes(range(128)).decode()).ids) <= 128


def test_the_chat_template_marks_roles_and_ends(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "tiny-mistral")
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"
    assert ids.count(tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("name", RECIPES)
def test_tokens_that_do_not_print_have_no_output_row(folder: Path, name: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / name / "tokenizer.json"))
    tensors = load_file(folder / name / "model.safetensors")
    rows = tensors["model.embed_tokens.weight" if RECIPES[name].tied else "lm_head.weight"]
    printable = set(printable_ids(tokenizer))
    assert len(printable) > 300
    end_id = tokenizer.token_to_id("<|end|>")
    for token in range(VOCABULARY):
        assert bool(rows[token].any()) == (token in printable or token == end_id)


def test_greedy_answers_print_and_are_long_enough(folder: Path) -> None:
    engine = TorchEngine(TorchEngineSettings(weights_bytes=2**24, kv_bytes=2**23, slab_bytes=2**17), lambda: 0.0)
    lengths = []
    for name in RECIPES:
        spec = ModelSpec(name=name, path=str(folder / name), weights_bytes=1, kv_bytes_per_token=1, context_tokens=2048)
        engine.load(name, spec)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder / name)
        for n, text in enumerate(("How are you?", "What is a tide?", "Write a story.", "Count to ten.")):
            asked = [{"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
            engine.add(request(f"{name}-{n}", prompt, instance_id=name, max_tokens=24))
        for tokens in drain(engine).tokens.values():
            answer = tokenizer.decode(tokens)
            assert answer.isascii()
            assert answer.isprintable()
            lengths.append(len(tokens))
    assert sorted(lengths)[len(lengths) // 2] == 24


@pytest.mark.parametrize(("dtype", "element_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_weights_take_in_an_engine_what_their_number_says(folder: Path, dtype: torch.dtype, element_bytes: int) -> None:
    """Up to the gaps between tensors. The control plane places models by that number."""
    for name in RECIPES:
        skeleton = build_skeleton(folder / name, dtype, torch.device("cpu"))
        gaps = skeleton.size_bytes - element_bytes * describe_checkpoint(folder / name)["parameters"]
        assert 0 <= gaps < ALIGNMENT_BYTES * len(skeleton.places), name
