"""LoRA adapters make the tokens of models whose weights contain them, whatever else is in their batches."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from dataplane.checkpoints.adapters import WEIGHTS_FILE, read_adapter
from dataplane.engines.torch.model.adapters import Adapters, read_factors
from dataplane.engines.torch.model.inputs import ChunkInput
from dataplane.protocol.errors import ModelLoadError
from dataplane.scheduling.schedule import TurnSettings
from ops.local.tiny_adapters import build_tiny_adapter
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.lora import adapter_maker, adapter_spec, merged
from tests.dataplane.engines.torch.model.packing import FORMATS, quantized_pair
from tests.dataplane.engines.torch.test_pooling import engine_of
from tests.dataplane.engines.torch.tiny import (
    ARCHITECTURES,
    VOCABULARY,
    another_default,
    greedy_tokens,
    save_tiny,
    spec_of,
)

MAX_TOKENS = 12
Checkpoint = Callable[[str], Path]


def prompt_of(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Callable[..., tuple[Path, Path]]:
    return adapter_maker(tmp_path_factory.mktemp("adapters"), checkpoint)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_several_adapters_and_the_base_in_one_batch(
    architecture: str, checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], *, mixed: bool
) -> None:
    base = checkpoint(architecture)
    adapters = {
        "all": made(architecture, "all"),
        "attention": made(architecture, "attention", rank=3, alpha=5.0, targets=["q_proj", "qkv_proj", "o_proj"]),
        "stabilized": made(architecture, "stabilized", rank=8, use_rslora=True),
    }
    engine = engine_of(turns=TurnSettings(mixed_batches=mixed))
    engine.load("base", spec_of("model", base))
    for name, (adapter, _) in adapters.items():
        engine.load(name, adapter_spec(name, adapter, base))
    folders = {"base": base, **{name: whole for name, (_, whole) in adapters.items()}}
    prompts = {name: prompt_of(number, 5 + 6 * number) for number, name in enumerate(folders)}
    expected = {name: greedy_tokens(folders[name], prompts[name], MAX_TOKENS) for name in folders}
    shared = {name: greedy_tokens(folders[name], prompts["all"], MAX_TOKENS) for name in folders}
    assert len(set(shared.values())) == len(folders), "an adapter that is left out would not show"

    asked = {name: request(name, prompts[name], instance_id=name, max_tokens=MAX_TOKENS) for name in folders}
    for name, one in asked.items():
        engine.add(one)
        assert drain(engine).tokens == {name: expected[name]}, "alone"
    together = drain(engine, later={0: [asked["all"], asked["base"]], 3: [asked["attention"], asked["stabilized"]]})
    assert together.tokens == expected
    same = [request(f"s-{name}", prompts["all"], instance_id=name, max_tokens=MAX_TOKENS) for name in folders]
    assert drain(engine, later={0: same}).tokens == {f"s-{name}": tokens for name, tokens in shared.items()}
    assert engine.stats().switches_total == 1, "adapters of one base share its turn"
    engine.close()


def test_one_adapter_of_a_slot_that_never_loads_the_base_by_itself(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]]
) -> None:
    base, (adapter, whole) = checkpoint("llama"), made("llama", "all")
    engine = engine_of()
    engine.load("a", adapter_spec("one", adapter, base))
    prompt = prompt_of(1, 20)
    engine.add(request("r", prompt, max_tokens=MAX_TOKENS))
    assert drain(engine).tokens == {"r": greedy_tokens(whole, prompt, MAX_TOKENS)}
    engine.unload("a")
    assert not engine.models
    assert engine.adapters.used_bytes == 0


def test_the_last_instance_of_an_adapter_takes_it_away_and_leaves_the_base_as_it_was(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]]
) -> None:
    base, (adapter, whole) = checkpoint("llama"), made("llama", "all")
    engine = engine_of()
    engine.load("base", spec_of("model", base))
    for instance_id in ("x", "y"):
        engine.load(instance_id, adapter_spec("one", adapter, base))
    engine.unload("x")
    prompt = prompt_of(2, 9)
    engine.add(request("r", prompt, instance_id="y", max_tokens=MAX_TOKENS))
    assert drain(engine).tokens["r"] == greedy_tokens(whole, prompt, MAX_TOKENS)
    engine.add(request("cut", prompt, instance_id="y", max_tokens=MAX_TOKENS))
    engine.add(request("stays", prompt, instance_id="base", max_tokens=MAX_TOKENS))
    engine.step()
    engine.unload("y")
    rest = drain(engine)
    assert rest.errors == {"cut": "instance y was unloaded"}
    assert rest.tokens["stays"] == greedy_tokens(base, prompt, MAX_TOKENS)
    assert engine.adapters.used_bytes == 0
    hooks = [
        len(module._forward_hooks) for module in engine.models["model"].weights.skeleton.adaptable_layers().values()
    ]
    assert not any(hooks)


def test_prefixes_are_shared_with_nobody_but_the_same_adapter(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]]
) -> None:
    base = checkpoint("llama")
    engine = engine_of()
    engine.load("base", spec_of("model", base))
    wholes = {"base": base}
    for name in ("all", "stabilized"):
        adapter, wholes[name] = made("llama", name, use_rslora=name == "stabilized")
        engine.load(name, adapter_spec(name, adapter, base))
    prompt = prompt_of(3, 30)
    for turn in range(2):
        for name, whole in wholes.items():
            engine.add(request(f"{name}-{turn}", prompt, instance_id=name, max_tokens=MAX_TOKENS))
            outputs = []
            while engine.has_work():
                outputs += engine.step()
            assert sum(output.cached_tokens for output in outputs) == (28 if turn else 0), name
            tokens = tuple(token for output in outputs for token in output.token_ids)
            assert tokens == greedy_tokens(whole, prompt, MAX_TOKENS)
    assert engine.stats().prefix_hit_tokens == {"model": 28, "all": 28, "stabilized": 28}


def test_two_bases_that_switch_keep_their_adapters(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    engine = engine_of(weights_bytes=24 * 2**14, kv_bytes=2**16, slab_bytes=2**14)  # one model at a time
    expected = {}
    for architecture in ("llama", "qwen3"):
        base, (adapter, whole) = checkpoint(architecture), made(architecture, "all")
        spec = adapter_spec(f"{architecture}-a", adapter, base, base_name=architecture)
        engine.load(architecture, spec)
        for number in range(3):
            prompt = prompt_of(number, 12)
            expected[f"{architecture}-{number}"] = greedy_tokens(whole, prompt, MAX_TOKENS)
    joining = [
        request(name, prompt_of(int(name[-1]), 12), instance_id=name[:-2], max_tokens=MAX_TOKENS) for name in expected
    ]
    assert drain(engine, later={2 * at: [one] for at, one in enumerate(joining)}).tokens == expected
    engine.check()


@pytest.mark.parametrize("host_kv_bytes", [0, 2**20])
def test_after_preemption_by_lack_of_kv(
    host_kv_bytes: int, checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]]
) -> None:
    """KV that is swapped or computed again is that of its adapter."""
    base, (adapter, whole) = checkpoint("llama"), made("llama", "all")
    engine = engine_of(slab_bytes=4608, kv_bytes=8 * 4608, block_tokens=8, host_kv_bytes=host_kv_bytes)  # 64 tokens
    engine.load("base", spec_of("model", base))
    engine.load("a", adapter_spec("one", adapter, base))
    expected = {}
    for number in range(6):
        instance_id, folder = (("a", whole), ("base", base))[number % 2]
        prompt = prompt_of(number, 10 + 3 * number)
        expected[f"r{number}"] = greedy_tokens(folder, prompt, MAX_TOKENS)
        engine.add(request(f"r{number}", prompt, instance_id=instance_id, max_tokens=MAX_TOKENS))
    assert drain(engine).tokens == expected
    assert engine.stats().extra["preemptions"] >= 1


def test_prefilled_on_one_slot_and_decoded_on_another(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    base, (adapter, whole) = checkpoint("llama"), made("llama", "all")
    given = {"host_kv_bytes": 2**20, "slab_bytes": 4608, "kv_bytes": 40 * 4608}
    prefiller = engine_of(prefill_only=True, host_kv_file=tmp_path / "kv", **given)
    decoder = engine_of(**given)
    for engine in (prefiller, decoder):
        engine.load("a", adapter_spec("one", adapter, base))
    prompt = prompt_of(8, 20)
    asked = request("r", prompt, max_tokens=MAX_TOKENS)
    prefiller.add(asked)
    outputs = []
    while not any(output.kv for output in outputs):
        outputs += prefiller.step()
    tokens = tuple(token for output in outputs for token in output.token_ids)
    decoder.add(replace(asked, generated=tokens, kv=outputs[-1].kv))
    assert tokens + drain(decoder).tokens["r"] == greedy_tokens(whole, prompt, MAX_TOKENS)
    assert len(tokens) == 1
    prefiller.close()
    decoder.close()


def test_one_that_was_prepared_for_a_second_instance_leaves_with_the_first(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]]
) -> None:
    """Its base stays."""
    base, (adapter, _) = checkpoint("llama"), made("llama", "all")
    engine, spec = engine_of(), adapter_spec("one", adapter, base)
    engine.load("base", spec_of("model", base))
    engine.load("a", spec)
    engine.prepare(spec)
    assert engine.is_prepared(spec)
    engine.unload("a")
    assert not engine.is_prepared(spec)


def test_bfloat16(checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]]) -> None:
    """The base's tokens are the same whether the request beside it has an adapter or not."""
    base, (adapter, _) = checkpoint("llama"), made("llama", "all")
    tokens = []
    for spec in (spec_of("model", base), adapter_spec("one", adapter, base)):
        engine = engine_of(dtype="bfloat16")
        engine.load("x", spec)
        engine.load("base", spec_of("model", base))
        engine.add(request("x", prompt_of(5, 3), instance_id="x", max_tokens=60, ignore_eos=True))
        engine.add(request("r", prompt_of(4, 25), instance_id="base", max_tokens=40, ignore_eos=True))
        tokens.append(drain(engine).tokens)
    assert tokens[0]["r"] == tokens[1]["r"]
    assert tokens[0]["x"] != tokens[1]["x"]


@pytest.mark.parametrize("form", ["awq", "gptq", "fp8, blocks"])
def test_on_a_quantized_base(form: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    config, pack = FORMATS[form]
    quantized, meant = quantized_pair(checkpoint("llama"), tmp_path, config, pack)
    adapter = build_tiny_adapter(tmp_path / "adapter", meant)
    whole = merged(meant, adapter, tmp_path / "merged")
    engine = engine_of()
    engine.load("base", spec_of("model", quantized))
    engine.load("a", adapter_spec("one", adapter, quantized))
    prompt = prompt_of(6, 11)
    engine.add(request("r", prompt, max_tokens=MAX_TOKENS))
    engine.add(request("b", prompt, instance_id="base", max_tokens=MAX_TOKENS))
    expected = {"r": greedy_tokens(whole, prompt, MAX_TOKENS), "b": greedy_tokens(meant, prompt, MAX_TOKENS)}
    assert drain(engine).tokens == expected


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"rank": 9}, {"adapter_rank_max": 8}, r"r must be 1 to 8, not 9"),
        ({"use_dora": True}, {}, r"use_dora is not supported"),
        ({"bias": "all"}, {}, r"bias 'all' is not supported; supported is none"),
        ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, {}, r"rank_pattern is not supported"),
        ({"peft_type": "IA3"}, {}, r"peft_type 'IA3' is not supported; supported is LORA"),
        ({"task_type": "SEQ_CLS"}, {}, r"task_type 'SEQ_CLS' is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, r"init_lora_weights 'pissa_niter_4' is not supported"),
        ({"new_field_of_peft": 3}, {}, r"new_field_of_peft is not supported"),
        ({}, {"adapters_bytes": 1000}, r"its factors take \d+ bytes; of adapters_bytes=1000 of the slot, 0 are in use"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], settings: dict[str, Any], message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    adapter = build_tiny_adapter(tmp_path / "adapter", checkpoint("llama"), **fields)
    engine = engine_of(**settings)
    with pytest.raises(ModelLoadError, match=message):
        engine.load("a", adapter_spec("one", adapter, checkpoint("llama")))
    assert not engine.models


def test_another_base_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    wider = save_tiny("llama", tmp_path / "wider", hidden_size=60, head_dim=12)
    adapter = build_tiny_adapter(tmp_path / "adapter", wider)
    engine = engine_of()
    engine.load("base", spec_of("model", checkpoint("llama")))
    with pytest.raises(ModelLoadError, match=r"is of another base: it changes model\.layers\.0\.\S+ of shape"):
        engine.load("a", adapter_spec("one", adapter, checkpoint("llama")))
    deeper = build_tiny_adapter(tmp_path / "deeper", save_tiny("llama", tmp_path / "deep", num_hidden_layers=4))
    with pytest.raises(ModelLoadError, match=r"changes model\.layers\.3\.\S+, which is no linear layer"):
        engine.load("a", adapter_spec("one", deeper, checkpoint("llama")))


def test_a_second_folder_under_a_loaded_name_is_refused(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]]
) -> None:
    base = checkpoint("llama")
    engine = engine_of()
    engine.load("a", adapter_spec("one", made("llama", "all")[0], base))
    with pytest.raises(ModelLoadError, match=r"one is loaded from \S+all for \S+ of \S+, not from \S+attention for"):
        engine.load("b", adapter_spec("one", made("llama", "attention", targets=["q_proj"])[0], base))


def test_a_second_base_under_a_loaded_name_is_refused(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]]
) -> None:
    base, (adapter, _) = checkpoint("llama"), made("llama", "all")
    engine = engine_of()
    engine.load("a", adapter_spec("one", adapter, base))
    with pytest.raises(ModelLoadError, match=r"one is loaded from \S+ for model of \S+, not from \S+ for other of"):
        engine.load("b", adapter_spec("one", adapter, base, base_name="other"))


def test_an_adapter_that_was_prepared_for_a_base_is_compared_with_its_next_one(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """As where it is unloaded while it is being loaded, and declared anew."""
    adapter, wider = made("llama", "all")[0], save_tiny("llama", tmp_path / "wider", hidden_size=60, head_dim=12)
    engine = engine_of()
    engine.prepare(adapter_spec("one", adapter, checkpoint("llama")))
    with pytest.raises(ModelLoadError, match="is of another base"):
        engine.load("a", adapter_spec("one", adapter, wider, base_name="wider"))


def test_an_adapter_that_was_prepared_for_nothing_is_read_again_once_it_is_forgotten(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """As where it is unloaded while it is being loaded, its files are replaced, and it is declared anew."""
    base, (other, whole) = checkpoint("llama"), made("llama", "all")
    adapter = build_tiny_adapter(tmp_path / "one", base, rank=2)
    spec = adapter_spec("one", adapter, base)
    engine = engine_of()
    engine.prepare(spec)
    for file in other.iterdir():
        (adapter / file.name).write_bytes(file.read_bytes())
    engine.forget(spec)
    engine.load("a", spec)
    engine.forget(spec)
    prompt = prompt_of(4, 9)
    engine.add(request("r", prompt, instance_id="a", max_tokens=MAX_TOKENS))
    assert drain(engine).tokens["r"] == greedy_tokens(whole, prompt, MAX_TOKENS)


def test_an_adapter_whose_base_does_not_fit_is_read_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Nothing is kept of it: its files may be replaced before it is loaded again."""
    base = checkpoint("llama")
    adapter = build_tiny_adapter(tmp_path / "one", base)
    engine = engine_of(kv_bytes=1000)
    for message in ("kv_bytes is less than a slab", str(adapter)):
        with pytest.raises(ModelLoadError, match=message):
            engine.load("a", adapter_spec("one", adapter, base))
        (adapter / WEIGHTS_FILE).unlink(missing_ok=True)


def test_files_that_were_replaced_have_another_key_though_their_size_and_time_are_the_same(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Their cached prefixes must not be taken for those of the former ones."""
    base = checkpoint("llama")
    adapter = build_tiny_adapter(tmp_path / "one", base)
    engine = engine_of()
    engine.load("base", spec_of("model", base))
    prompt, seen = prompt_of(3, 30), []
    for number in range(2):
        os.utime(adapter / WEIGHTS_FILE, ns=(1, 1))
        engine.load("a", adapter_spec("one", adapter, base))
        engine.add(request(f"r{number}", prompt, max_tokens=MAX_TOKENS))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        seen.append(sum(output.cached_tokens for output in outputs))
        engine.unload("a")
        other = build_tiny_adapter(tmp_path / "two", base)
        (other / WEIGHTS_FILE).replace(adapter / WEIGHTS_FILE)
    assert seen == [0, 0]


def test_rows_of_an_adapter_that_is_not_there_are_not_answered_by_the_base() -> None:
    with pytest.raises(KeyError, match="gone"):
        Adapters().select([ChunkInput(tokens=(1,), start=0, blocks=(0,), adapter="gone")])


def test_numbers_that_are_not_finite_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    adapter = build_tiny_adapter(tmp_path / "adapter", checkpoint("llama"))
    factors = load_file(adapter / WEIGHTS_FILE)
    next(iter(factors.values()))[0, 0] = float("nan")
    save_file(factors, adapter / WEIGHTS_FILE)
    with pytest.raises(ModelLoadError, match="are not all finite numbers"):
        engine_of().load("a", adapter_spec("one", adapter, checkpoint("llama")))


def test_factors_are_read_in_32_bits_whatever_another_thread_builds(checkpoint: Checkpoint, tmp_path: Path) -> None:
    adapter = build_tiny_adapter(tmp_path / "adapter", checkpoint("llama"))
    with another_default(torch.bfloat16):
        read = read_factors("one", read_adapter(adapter), torch.float32)
    written = load_file(adapter / WEIGHTS_FILE)
    assert read.layers
    for layer, factors in read.layers.items():
        (down,) = (factor for name, factor in written.items() if name.endswith(f"{layer}.lora_A.weight"))
        assert torch.equal(factors.down, down)
