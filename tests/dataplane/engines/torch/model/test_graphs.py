"""Decode steps as graphs. Without a GPU, a graph that is replayed runs its step again on the inputs it was captured
with.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataplane.engines.torch import steps
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.model import graphs
from dataplane.engines.torch.model.graphs import DecodeGraphs, graph_size
from dataplane.engines.torch.model.skeleton import Skeleton
from dataplane.engines.torch.settings import TorchEngineSettings
from ops.local.tiny_adapters import build_tiny_adapter
from tests.dataplane.engines.torch.drive import Gathered, drain, request
from tests.dataplane.engines.torch.lora import adapter_spec
from tests.dataplane.engines.torch.tiny import VOCABULARY, another_default, spec_of

Checkpoint = Callable[[str], Path]
ONE_MODEL = 12 * 2**15


class Device:
    """In place of CUDA. `sizes`: of the batches that were captured, in order; `refused`: how many captures are yet to
    fail; `replays`: how many there were.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replays = 0
        self.refused = 0
        self.capturing: Graph | None = None

    def wait_stream(self, other: Any) -> None:
        """As of a stream, of which there is one here."""

    def forward(self, real: Callable[..., None]) -> Callable[..., None]:
        def run(skeleton: Skeleton, cache: torch.Tensor, made: Any, size: int) -> None:
            if self.capturing is not None:
                if self.refused:
                    self.refused -= 1
                    raise RuntimeError("operation not permitted when stream is capturing")
                self.capturing.addresses = lambda: skeleton.addresses
                self.capturing.was_at = skeleton.addresses
                self.capturing.step = lambda: real(skeleton, cache, made, size)
                self.sizes.append(size)
            else:
                real(skeleton, cache, made, size)

        return run


class Graph:
    """In place of `torch.cuda.CUDAGraph`. Capturing computes nothing."""

    device: Device
    step: Callable[[], None]
    addresses: Callable[[], tuple[int, ...]]
    was_at: tuple[int, ...]

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads copy meanwhile"
        self.device.capturing = self

    def capture_end(self) -> None:
        self.device.capturing = None

    def replay(self) -> None:
        assert self.addresses() == self.was_at, "a graph of weights that have moved"
        self.device.replays += 1
        self.step()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    Graph.device = device
    for name in ("Stream", "current_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: device)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(graphs, "_forward", device.forward(graphs._forward))
    monkeypatch.setattr(
        TorchEngine, "_make_graphs", lambda engine: DecodeGraphs(engine._device, engine._settings.batch_max)
    )
    yield device
    assert device.capturing is None


def engine_of(**changes: Any) -> TorchEngine:
    given: dict[str, Any] = {"weights_bytes": 2**24, "kv_bytes": 2**21, "slab_bytes": 2**15, **changes}
    engine = TorchEngine(TorchEngineSettings(**given), lambda: 0.0)
    engine.weights._buffer.zero_()  # a CPU multiplies masked entries by zero, which graphs do not clear
    return engine


def ask(engine: TorchEngine, instances: str, count: int) -> Gathered:
    """The answers to requests of many lengths for instances in rotation, so that batches grow and shrink."""
    for number in range(count):
        prompt = [(5 * place + number) % VOCABULARY for place in range(1 + 3 * number)]
        given = {"instance_id": instances[number % len(instances)], "max_tokens": 6 + 3 * number, "ignore_eos": True}
        engine.add(request(f"r{number}", prompt, **given))
    return drain(engine)


def loaded(folders: list[Path], **settings: Any) -> TorchEngine:
    """Instances "0", "1", ... of models."""
    engine = engine_of(**settings)
    for number, folder in enumerate(folders):
        engine.load(str(number), spec_of(f"model-{number}", folder))
    return engine


def without_graphs(folders: list[Path], instances: str, count: int, **settings: Any) -> Gathered:
    engine = loaded(folders, **settings)
    engine._steps._graphs = None
    return ask(engine, instances, count)


def test_graphs_change_no_token_while_models_take_turns(checkpoint: Checkpoint, device: Device) -> None:
    folders = [checkpoint("llama"), checkpoint("gemma2")]
    slot = {"weights_bytes": ONE_MODEL, "batch_max": 7}
    engine = loaded(folders, **slot)
    tokens = ask(engine, "01", 14)
    assert tokens == without_graphs(folders, "01", 14, **slot)
    assert tokens.errors == {}
    assert engine.stats().switches_total > 2
    assert set(device.sizes) == {1, 2, 4, 7}, "batches of 5 to 7 take one of 7"
    assert device.replays > 3 * len(device.sizes)
    assert engine._steps._captures == len(device.sizes)


def test_a_model_that_comes_to_another_place_has_other_graphs(checkpoint: Checkpoint, device: Device) -> None:
    folders = [checkpoint(name) for name in ("llama", "gemma2", "qwen3")]
    slot = {"weights_bytes": 2 * ONE_MODEL, "kv_bytes": 2**20}
    engine = loaded(folders, **slot)
    for instances in ("0", "1", "2", "0", "1", "20", "0"):
        assert ask(engine, instances, 3) == without_graphs(folders, instances, 3, **slot)
    assert engine._graphs is not None
    places = [{addresses for addresses, _ in made.known} for made in engine._graphs._models.values()]
    assert max(map(len, places)) > 1


def test_sizes() -> None:
    assert [graph_size(n) for n in (1, 2, 3, 4, 5, 8, 9, 17, 64)] == [1, 2, 4, 4, 8, 8, 16, 24, 64]


def test_those_used_least_recently_are_dropped(
    checkpoint: Checkpoint, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "GRAPHS_KEPT", 2)
    folders = [checkpoint("llama")]
    engine = loaded(folders)
    assert ask(engine, "0", 10) == without_graphs(folders, "0", 10)
    assert engine._graphs is not None
    (made,) = engine._graphs._models.values()
    assert [size for _, size in made.known] == [2, 1]


def test_a_capture_that_fails_leaves_the_model_without_graphs_and_others_with(
    checkpoint: Checkpoint, device: Device
) -> None:
    device.refused = 1
    folders = [checkpoint("llama"), checkpoint("gemma2")]
    engine = loaded(folders)
    for instance, captures in (("0", False), ("1", True)):
        before = len(device.sizes)
        tokens = ask(engine, instance, 5)
        assert tokens == without_graphs(folders, instance, 5)
        assert (len(device.sizes) > before) == captures


def test_rows_with_adapters_are_in_no_graph_and_leave_nothing_in_one(
    checkpoint: Checkpoint, device: Device, tmp_path: Path
) -> None:
    """The adapter's hooks are there when the base's steps are captured and replayed."""
    base = checkpoint("llama")
    adapter = build_tiny_adapter(tmp_path / "adapter", base)
    engine = loaded([base])
    engine.load("a", adapter_spec("one", adapter, base, base_name="model-0"))
    alone = ask(engine, "a", 4)
    assert (device.sizes, device.replays) == ([], 0)
    assert ask(engine, "0", 4) == without_graphs([base], "0", 4) != alone
    assert device.replays
    assert ask(engine, "a", 4) == alone
    others = without_graphs([base], "0", 4)
    replays = device.replays
    mixed = ask(engine, "a0", 4).tokens
    assert mixed == {f"r{n}": (others if n % 2 else alone).tokens[f"r{n}"] for n in range(4)}
    assert device.replays > replays, "the base's request is the last one"


def test_no_graph_where_a_step_waits_for_shards_or_notes_that_they_have_passed(
    checkpoint: Checkpoint, device: Device
) -> None:
    engine = loaded([checkpoint("llama")])
    ask(engine, "0", 2)
    before = len(device.sizes), device.replays
    skeleton = engine.models["model-0"].weights.skeleton
    skeleton.passed_shard = lambda shard: None
    tokens = ask(engine, "0", 2)
    assert (len(device.sizes), device.replays) == before
    skeleton.passed_shard = None
    assert ask(engine, "0", 2) == tokens
    assert device.replays > before[1]


def test_inputs_are_filled_between_the_launch_of_the_step_before_and_the_wait_for_its_tokens(
    checkpoint: Checkpoint, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests in a graph for four: the row that pads it follows the first."""
    order: list[str] = []

    def noted(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (order.append(what), real(*given))[1]

    engine = loaded([checkpoint("llama")])
    for number in range(3):
        engine.add(request(f"r{number}", range(3, 9 + number), instance_id="0", max_tokens=12, ignore_eos=True))
    while not device.replays:
        engine.step()
    monkeypatch.setattr(DecodeGraphs, "_fill", staticmethod(noted("fill", DecodeGraphs._fill)))
    monkeypatch.setattr(Graph, "replay", noted("launch", Graph.replay))
    monkeypatch.setattr(steps, "on_host", noted("tokens", steps.on_host))
    for _ in range(4):
        engine.step()
    assert order == ["launch", "fill", "tokens"] * 4


@pytest.mark.parametrize("change", ["shards are noted", "moved", "dropped"])
def test_a_prepared_step_that_has_no_graph_any_more_runs_without(
    checkpoint: Checkpoint, device: Device, change: str
) -> None:
    engine = loaded([checkpoint("llama")])
    engine.add(request("r0", range(3, 9), instance_id="0", max_tokens=20, ignore_eos=True))
    gathered = Gathered()
    while not device.replays:
        gathered.take(engine.step())
    assert engine._steps._prepared is not None
    assert engine._graphs is not None
    skeleton, replays = engine.models["model-0"].weights.skeleton, device.replays
    if change == "shards are noted":
        skeleton.passed_shard = lambda shard: None
    elif change == "moved":
        skeleton.addresses = tuple(address + 1 for address in skeleton.addresses)
    else:
        engine._graphs._models[skeleton].known.clear()
    gathered.take(engine.step())
    assert device.replays == replays
    tokens = gathered.tokens["r0"] + drain(engine).tokens["r0"]
    plain = loaded([checkpoint("llama")])
    plain._steps._graphs = None
    plain.add(request("r0", range(3, 9), instance_id="0", max_tokens=20, ignore_eos=True))
    assert tokens == drain(plain).tokens["r0"]


def test_a_model_that_is_forgotten_leaves_no_graph(checkpoint: Checkpoint, device: Device) -> None:
    engine = loaded([checkpoint("llama"), checkpoint("gemma2")])
    ask(engine, "01", 4)
    engine.unload("0")
    assert engine._graphs is not None
    assert list(engine._graphs._models) == [engine.models["model-1"].weights.skeleton]
    assert ask(engine, "1", 2) == without_graphs([checkpoint("llama"), checkpoint("gemma2")], "1", 2)


def test_logits_are_numbers_of_32_bits_whatever_another_thread_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    skeleton: Any = SimpleNamespace(geometry=SimpleNamespace(context_tokens=8, vocabulary=4))
    with another_default(torch.bfloat16):
        made = DecodeGraphs(torch.device("cpu"), 2)._inputs(skeleton, torch.empty(1, 1, 1, 1, 4))
    assert made.logits.dtype == torch.float32
