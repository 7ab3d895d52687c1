"""vLLM's LoRA makes the tokens of models whose weights contain the adapters, whatever else is in their batches."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from dataplane.checkpoints.adapters import WEIGHTS_FILE
from dataplane.protocol.errors import ModelLoadError
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.lora import adapter_maker, adapter_spec
from tests.dataplane.engines.torch.test_greedy import prompts
from tests.dataplane.engines.torch.tiny import VOCABULARY, greedy_tokens, spec_of

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

MAX_TOKENS = 12
PROMPT = prompts(VOCABULARY, (70,))["r70"]
Checkpoint = Callable[[str], Path]
Engine = Callable[..., Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Callable[..., tuple[Path, Path]]:
    return adapter_maker(tmp_path_factory.mktemp("adapters"), checkpoint)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "granite"])
def test_several_adapters_and_the_base_in_one_batch(
    architecture: str, checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], make_engine: Engine
) -> None:
    base = checkpoint(architecture)
    adapters = {
        "all": made(architecture, "all"),
        "attention": made(architecture, "attention", rank=3, alpha=5.0, targets=["q_proj", "qkv_proj", "o_proj"]),
        "stabilized": made(architecture, "stabilized", rank=8, use_rslora=True),
    }
    engine = make_engine(adapters_max=3, prefill_tokens_per_step_max=7)
    engine.load("base", spec_of("model", base))
    for name, (adapter, _) in adapters.items():
        engine.load(name, adapter_spec(name, adapter, base))
    folders = {"base": base, **{name: whole for name, (_, whole) in adapters.items()}}
    given = dict(zip(folders, prompts(VOCABULARY, (5, 11, 17, 23)).values(), strict=True))
    expected = {name: greedy_tokens(folders[name], given[name], MAX_TOKENS) for name in folders}
    asked = {name: request(name, given[name], instance_id=name, max_tokens=MAX_TOKENS) for name in folders}
    together = drain(engine, later={0: [asked["all"], asked["base"]], 3: [asked["attention"], asked["stabilized"]]})
    assert together.errors == {}
    assert together.tokens == expected

    shared = {name: greedy_tokens(folders[name], PROMPT, MAX_TOKENS) for name in folders}
    assert len(set(shared.values())) == len(folders), "an adapter that is left out would not show"
    for again in ("first", "cached"):
        same = [request(f"{again}-{name}", PROMPT, instance_id=name, max_tokens=MAX_TOKENS) for name in folders]
        assert drain(engine, later={0: same}).tokens == {f"{again}-{name}": one for name, one in shared.items()}


def test_an_adapter_is_added_and_taken_away_while_its_base_streams(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], make_engine: Engine
) -> None:
    base, (adapter, whole) = checkpoint("llama"), made("llama", "all")
    engine = make_engine(adapters_max=1)
    engine.load("base", spec_of("model", base))
    stream = request("stream", PROMPT, instance_id="base", max_tokens=60, ignore_eos=True)
    engine.add(stream)
    received: list[int] = []

    def step_until(count: int) -> None:
        while len(received) < count:
            received.extend(token for output in engine.step() for token in output.token_ids)

    step_until(5)
    engine.load("x", adapter_spec("one", adapter, base))
    engine.load("y", adapter_spec("one", adapter, base))
    with pytest.raises(ModelLoadError, match=r"two: its base is loaded for 1 adapters .* and has one"):
        engine.load("z", adapter_spec("two", adapter, base))
    step_until(10)
    engine.unload("x")
    engine.add(request("r", PROMPT, instance_id="y", max_tokens=MAX_TOKENS))
    engine.add(request("cut", PROMPT, instance_id="y", max_tokens=100, ignore_eos=True))
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        for output in engine.step():
            {"r": tokens, "stream": received}.get(output.request_id, []).extend(output.token_ids)
    assert tuple(tokens) == greedy_tokens(whole, PROMPT, MAX_TOKENS)
    engine.unload("y")
    engine.load("z", adapter_spec("two", adapter, base))
    rest = drain(engine)
    assert rest.errors == {"cut": "instance y was unloaded"}
    engine.add(replace(stream, request_id="calm"))
    assert drain(engine).tokens["calm"] == (*received, *rest.tokens["stream"])


def test_numbers_that_were_replaced_find_no_prefix_of_the_former_ones(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], make_engine: Engine, tmp_path: Path
) -> None:
    base, target = checkpoint("llama"), tmp_path / "adapter"
    engine = make_engine(adapters_max=1)
    engine.load("base", spec_of("model", base))
    for name in ("all", "other"):
        adapter, whole = made("llama", name)
        shutil.copytree(adapter, target, dirs_exist_ok=True)
        engine.load("a", adapter_spec("one", target, base))
        for cached in (0, 64):
            engine.add(request("r", PROMPT, max_tokens=MAX_TOKENS))
            outputs = []
            while engine.has_work():
                outputs += engine.step()
            made_tokens = tuple(token for output in outputs for token in output.token_ids)
            assert (made_tokens, outputs[0].cached_tokens) == (greedy_tokens(whole, PROMPT, MAX_TOKENS), cached)
        engine.unload("a")


def test_an_adapter_alone_gets_memory_for_its_own_rank(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], make_engine: Engine
) -> None:
    base, (adapter, whole) = checkpoint("qwen3"), made("qwen3", "high", rank=17)
    engine = make_engine()
    engine.load("a", adapter_spec("one", adapter, base))
    limits = engine.models["model"].runner.adapters.limits
    assert (limits.count, limits.rank) == (1, 32)
    engine.add(request("r", PROMPT, max_tokens=MAX_TOKENS))
    assert drain(engine).tokens == {"r": greedy_tokens(whole, PROMPT, MAX_TOKENS)}
    engine.unload("a")
    assert not engine.models


def test_of_adapters_prepared_before_their_base_the_highest_rank_gets_memory(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], make_engine: Engine
) -> None:
    base, engine = checkpoint("qwen3"), make_engine()
    specs = [adapter_spec(f"r{rank}", made("qwen3", f"r{rank}", rank=rank)[0], base) for rank in (17, 3)]
    for spec in specs:
        engine.prepare(spec)
    engine.load("a", specs[1])
    assert engine.models["model"].runner.adapters.limits.rank == 32


def rewritten(adapter: Path, target: Path, **config: Any) -> Path:
    """A copy of an adapter with other fields in its config."""
    shutil.copytree(adapter, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return target


def test_a_wrong_adapter_is_refused_and_harms_nobody(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], make_engine: Engine, tmp_path: Path
) -> None:
    base, (adapter, whole) = checkpoint("llama"), made("llama", "all")
    engine = make_engine(adapters_max=4, adapter_rank_max=8)
    engine.load("base", spec_of("model", base))
    engine.load("right", adapter_spec("right", adapter, base))
    engine.add(request("stream", PROMPT, instance_id="right", max_tokens=40))
    engine.step()
    broken = rewritten(adapter, tmp_path / "broken")
    numbers = load_file(broken / WEIGHTS_FILE)
    next(iter(numbers.values()))[0, 0] = float("nan")
    save_file(numbers, broken / WEIGHTS_FILE)
    beyond = rewritten(adapter, tmp_path / "beyond")
    numbers = load_file(adapter / WEIGHTS_FILE)
    moved = {name.replace("layers.0.", "layers.9."): value for name, value in numbers.items()}
    save_file(moved, beyond / WEIGHTS_FILE)
    normal = rewritten(adapter, tmp_path / "normal")
    wrong = {
        "r is 9, and its base is loaded for ranks up to 8": made("llama", "high", rank=9)[0],
        "numbers of .* are not all finite": broken,
        "changes model.layers.9.* which its base does not have": beyond,
        "is of another base: it changes .* of shape": made("qwen2", "all")[0],
        "use_dora is not supported": rewritten(adapter, tmp_path / "dora", use_dora=True),
        "does not exist": tmp_path / "nowhere",
    }
    for words, folder in wrong.items():
        with pytest.raises(ModelLoadError, match=words):
            engine.load("wrong", adapter_spec("wrong", folder, base))
    runner = engine.models["model"].runner
    runner.engine.add_lora, before = lambda request: 1 / 0, runner.engine.add_lora
    with pytest.raises(ModelLoadError, match="late: vLLM refuses the adapter: division by zero"):
        engine.load("late", adapter_spec("late", normal, base))
    runner.engine.add_lora = before
    engine.load("late", adapter_spec("late", normal, base))
    engine.add(request("base", PROMPT, instance_id="base", max_tokens=MAX_TOKENS))
    rest = drain(engine)
    assert rest.errors == {}
    assert rest.tokens["base"] == greedy_tokens(base, PROMPT, MAX_TOKENS)
    assert rest.tokens["stream"] == greedy_tokens(whole, PROMPT, 40)[-len(rest.tokens["stream"]) :]


def test_a_base_that_was_loaded_for_no_adapters_says_so(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], make_engine: Engine
) -> None:
    base, (adapter, _) = checkpoint("llama"), made("llama", "all")
    engine = make_engine()
    engine.load("base", spec_of("model", base))
    with pytest.raises(ModelLoadError, match="one: its base is loaded for no adapters; vllm_adapters_max must be 1"):
        engine.load("a", adapter_spec("one", adapter, base))
    crowded = make_engine(adapters_max=100, adapter_rank_max=128)
    with pytest.raises(ModelLoadError, match="with memory for 100 adapters of rank 128"):
        crowded.load("base", spec_of("model", base))


def test_a_base_gets_memory_for_those_that_are_to_be_loaded_beside_it(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], make_engine: Engine, tmp_path: Path
) -> None:
    base, vast = checkpoint("qwen3"), str(made("qwen3", "vast", rank=128)[0])
    beside = [str(made("qwen3", f"r{rank}", rank=rank)[0]) for rank in (17, 3)]
    for folders, limits in (
        ([*beside, str(tmp_path / "nowhere")], (2, 32)),
        ([vast] * 100, (0, 0)),
    ):
        engine = make_engine()
        engine.load("base", replace(spec_of("model", base), adapters=tuple(folders)))
        got = engine.models["model"].runner.adapters.limits
        assert (got.count, got.rank) == limits
    roomy = make_engine(adapters_max=4, adapter_rank_max=8)
    roomy.load("base", replace(spec_of("model", base), adapters=tuple(beside)))
    assert roomy.models["model"].runner.adapters.limits.count == 4


def test_a_base_that_is_loaded_anew_gets_no_memory_for_adapters_of_before(
    checkpoint: Checkpoint, made: Callable[..., tuple[Path, Path]], make_engine: Engine
) -> None:
    base, (adapter, _), engine = checkpoint("qwen3"), made("qwen3", "r17", rank=17), make_engine()
    for folders, limits in (((str(adapter),), (1, 32)), ((), (0, 0))):
        engine.load("base", replace(spec_of("model", base), adapters=folders))
        got = engine.models["model"].runner.adapters.limits
        assert (got.count, got.rank) == limits
        if folders:
            engine.load("a", adapter_spec("one", adapter, base))
            engine.unload("a")
        engine.unload("base")
