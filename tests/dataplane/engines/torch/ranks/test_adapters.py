"""LoRA adapters that several ranks run together make the tokens of models whose weights contain them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dataplane.checkpoints.adapters import read_adapter
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.model.adapters import Adapter
from dataplane.protocol.errors import ModelLoadError
from ops.local.tiny_adapters import build_tiny_adapter
from tests.dataplane.engines.torch.deep import Ticks
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.lora import adapter_maker, adapter_spec
from tests.dataplane.engines.torch.rank_engines import engine_of
from tests.dataplane.engines.torch.rank_threads import start_threads
from tests.dataplane.engines.torch.ranks.test_exactness import ROWS_OF_FOUR
from tests.dataplane.engines.torch.slots import slot_for_one
from tests.dataplane.engines.torch.test_adapters import prompt_of
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, greedy_tokens, save_tiny, spec_of

MAX_TOKENS = 8
Made = Callable[..., tuple[Path, Path]]
Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Made:
    return adapter_maker(tmp_path_factory.mktemp("adapters"), checkpoint)


def check_one_batch(engine: TorchEngine, base: Path, made: Made, architecture: str) -> None:
    """A base and three adapters of different layers and ranks, each on the same prompt, in one batch."""
    adapters = {
        "all": made(architecture, "all"),
        "attention": made(architecture, "attention", rank=3, alpha=5.0, targets=["q_proj", "qkv_proj", "o_proj"]),
        "stabilized": made(architecture, "stabilized", rank=8, use_rslora=True),
    }
    engine.load("base", spec_of("model", base))
    for name, (adapter, _) in adapters.items():
        engine.load(name, adapter_spec(name, adapter, base))
    folders = {"base": base, **{name: whole for name, (_, whole) in adapters.items()}}
    prompt = prompt_of(1, 21)
    for name in folders:
        engine.add(request(name, prompt, instance_id=name, max_tokens=MAX_TOKENS))
    gathered = drain(engine)
    for name in folders:
        engine.unload(name)
    expected = {name: greedy_tokens(folder, prompt, MAX_TOKENS) for name, folder in folders.items()}
    assert len(set(expected.values())) == len(folders), "an adapter that is left out would not show"
    assert gathered.errors == {}
    assert gathered.tokens == expected
    assert engine.adapters.used_bytes == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_several_adapters_and_the_base_in_one_batch_on_two_ranks(
    architecture: str, two: TorchEngine, checkpoint: Checkpoint, made: Made
) -> None:
    check_one_batch(two, checkpoint(architecture), made, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_and_on_four_of_which_two_have_the_same_kv_heads(
    architecture: str, four: TorchEngine, checkpoint: Checkpoint, made: Made, tmp_path: Path
) -> None:
    changes = ROWS_OF_FOUR.get(architecture)
    if changes:
        wider = save_tiny(architecture, tmp_path / "wider", **changes)
        check_one_batch(four, wider, adapter_maker(tmp_path, lambda _: wider), architecture)
    else:
        check_one_batch(four, checkpoint(architecture), made, architecture)


def test_each_rank_has_the_memory_of_its_part(two: TorchEngine, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Of the MLP, 48 to 96 and back, a rank has half of each up or down factor that is on the side of the 96."""
    base = checkpoint("llama")
    adapter = build_tiny_adapter(tmp_path / "mlp", base, rank=4, targets=["gate_proj", "down_proj"])
    two.load("a", adapter_spec("mlp", adapter, base))
    layers, float_bytes = 3, 4
    used = two.adapters.used_bytes
    two.unload("a")
    assert used == layers * 2 * 4 * (48 + 96 // 2) * float_bytes
    assert read_adapter(adapter).parameters * float_bytes == layers * 2 * 4 * (48 + 96) * float_bytes


def test_an_adapter_that_exceeds_the_memory_of_one_gpu_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A rank's part fits; a byte less than that does not."""
    base = checkpoint("llama")
    adapter = build_tiny_adapter(tmp_path / "mlp", base, rank=4, targets=["gate_proj", "down_proj"])
    part_bytes = 3 * 2 * 4 * (48 + 96 // 2) * 4
    exact = engine_of(2, tmp_path / "models", adapters_bytes=part_bytes)
    exact.load("a", adapter_spec("mlp", adapter, base))
    assert exact.adapters.used_bytes == part_bytes
    exact.close()
    less = engine_of(2, tmp_path / "models", adapters_bytes=part_bytes - 1)
    message = f"take {part_bytes} bytes on each of 2 GPUs; of adapters_bytes={part_bytes - 1} of the slot, 0 are"
    with pytest.raises(ModelLoadError, match=message):
        less.load("a", adapter_spec("mlp", adapter, base))
    assert not less.models
    less.close()


def test_an_adapter_that_another_rank_has_no_memory_for_is_refused_and_the_slot_goes_on(
    two: TorchEngine, checkpoint: Checkpoint, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, (adapter, whole) = checkpoint("llama"), made("llama", "late")
    mine, to = threading.get_ident(), Adapter.to

    def full(self: Adapter, device: torch.device) -> Adapter:
        if threading.get_ident() != mine:
            raise torch.OutOfMemoryError
        return to(self, device)

    two.load("base", spec_of("model", base))
    with monkeypatch.context() as patched:
        patched.setattr(Adapter, "to", full)
        with pytest.raises(ModelLoadError, match=r"late: no memory for \d+ bytes on rank 1"):
            two.load("late", adapter_spec("late", adapter, base))
    assert two.adapters.used_bytes == 0
    two.load("late", adapter_spec("late", adapter, base))
    prompt = prompt_of(2, 21)
    for name in ("base", "late"):
        two.add(request(name, prompt, instance_id=name, max_tokens=MAX_TOKENS))
    gathered = drain(two)
    for name in ("base", "late"):
        two.unload(name)
    assert gathered.tokens == {
        "base": greedy_tokens(base, prompt, MAX_TOKENS),
        "late": greedy_tokens(whole, prompt, MAX_TOKENS),
    }


def test_another_base_is_refused_by_its_whole_shape(two: TorchEngine, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A base half as wide, whose sizes are those of a rank."""
    half = save_tiny("llama", tmp_path / "half", num_attention_heads=2, num_key_value_heads=1, intermediate_size=48)
    adapter = build_tiny_adapter(tmp_path / "one", half)
    message = r"changes model.layers.0.mlp.down_proj of shape \(48, 48\), not \(48, 96\)"
    with pytest.raises(ModelLoadError, match=message):
        two.load("a", adapter_spec("one", adapter, checkpoint("llama")))
    assert not two.models


def test_what_was_replaced_answers_on_all_ranks(two: TorchEngine, checkpoint: Checkpoint, made: Made) -> None:
    """An adapter is unloaded while its base stays, and another one comes under its name."""
    base, prompt = checkpoint("qwen3"), prompt_of(4, 18)
    two.load("base", spec_of("model", base))
    for name in ("all", "attention"):
        adapter, whole = made("qwen3", name, targets=None if name == "all" else ["q_proj", "o_proj"])
        two.load("a", adapter_spec("one", adapter, base))
        two.add(request("r", prompt, max_tokens=MAX_TOKENS))
        two.add(request("b", prompt, instance_id="base", max_tokens=MAX_TOKENS))
        expected = {"r": greedy_tokens(whole, prompt, MAX_TOKENS), "b": greedy_tokens(base, prompt, MAX_TOKENS)}
        assert drain(two).tokens == expected
        two.unload("a")
    two.unload("base")


def test_bfloat16(checkpoint: Checkpoint, made: Made, tmp_path: Path) -> None:
    """The base's tokens are the same whether the request beside it has an adapter or not."""
    base, (adapter, _) = checkpoint("llama"), made("llama", "all")
    tokens = []
    for spec in (spec_of("model", base), adapter_spec("one", adapter, base)):
        engine = engine_of(2, tmp_path / "models", dtype="bfloat16")
        engine.load("x", spec)
        engine.load("base", spec_of("model", base))
        engine.add(request("x", prompt_of(5, 3), instance_id="x", max_tokens=20, ignore_eos=True))
        engine.add(request("r", prompt_of(4, 25), instance_id="base", max_tokens=20, ignore_eos=True))
        tokens.append(drain(engine).tokens)
        engine.close()
    assert tokens[0]["r"] == tokens[1]["r"]
    assert tokens[0]["x"] != tokens[1]["x"]


def test_they_outlive_switches_prefetches_and_preemption(checkpoint: Checkpoint, made: Made, tmp_path: Path) -> None:
    """Two bases in memory for one, of which each takes turns with the other while its requests decode."""
    bases = {name: checkpoint(name) for name in ("llama", "qwen3")}
    settings = slot_for_one(
        bases.values(),
        ranks=2,
        cache_folder=tmp_path / "models",
        slab_bytes=2304,
        kv_bytes=14 * 2304,
        host_kv_bytes=2**20,
        block_tokens=8,
        prefill_tokens_per_step_max=16,
        kv_pressure="swap",
    )
    engine = TorchEngine(settings, Ticks(), other_ranks=start_threads(1))
    expected = {}
    for name, base in bases.items():
        adapter, whole = made(name, "all")
        engine.load(f"{name}-a", adapter_spec(f"{name}-a", adapter, base, base_name=name))
        engine.load(f"{name}-b", spec_of(name, base))
        for number in range(3):
            for instance_id, folder in ((f"{name}-a", whole), (f"{name}-b", base)):
                prompt = prompt_of(number, 12 + 5 * number)
                expected[f"{instance_id}-{number}"] = greedy_tokens(folder, prompt, MAX_TOKENS)
    joining = [
        request(name, prompt_of(int(name[-1]), 12 + 5 * int(name[-1])), instance_id=name[:-2], max_tokens=MAX_TOKENS)
        for name in expected
    ]
    gathered = drain(engine, later={2 * at: [one] for at, one in enumerate(joining)})
    stats = engine.stats()
    engine.check()
    engine.close()
    assert gathered.errors == {}
    assert gathered.tokens == expected
    assert stats.switches_total >= 3
    assert stats.extra["swapped_in"] >= 1
