"""The benchmarks run on tiny models, say what they should of made-up times, and refuse what they cannot do."""

import json

import pytest
import torch

from dataplane.engines.torch.copies.base import Copy
from dataplane.engines.torch.copies.cpu import ThreadStream
from ops.cli.main import main
from ops.profiling import figures
from ops.profiling.checkpoints import BenchModel, Shape, build_checkpoints, parameters_of, shape_of
from ops.profiling.decode import decode_rate, measure_decode
from ops.profiling.figures import Figure, interleaved, medians
from ops.profiling.layerwise import PacedStream, measure_layerwise
from ops.profiling.switch import measure_control, measure_prefetch, measure_switch, open_slot
from ops.profiling.table import NAMES, BenchSettings, measure_figures

TINY = Shape(hidden=64, layers=3, head_dim=16)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[BenchModel]:
    return build_checkpoints(tmp_path_factory.mktemp("models"), [TINY, TINY], "float32")


@pytest.mark.parametrize("parameters", [30_000_000, 90_000_000, 700_000_000, 7_000_000_000, 14_000_000_000])
def test_shapes_have_about_the_parameters_asked_for(parameters: int) -> None:
    shape = shape_of(parameters)
    assert 10.5 * shape.layers * shape.hidden**2 == pytest.approx(parameters, rel=0.25)
    assert shape.config["num_attention_heads"] == 4 * shape.config["num_key_value_heads"]


def test_checkpoints_are_of_several_architectures_and_told_by_their_size(models: list[BenchModel]) -> None:
    types = [json.loads((model.folder / "config.json").read_text())["model_type"] for model in models]
    assert types == ["llama", "qwen3"]
    for model in models:
        stored = (model.folder / "model.safetensors").stat().st_size
        assert model.weights_bytes <= stored < model.weights_bytes + 100_000


def test_numbers_of_parameters() -> None:
    assert (parameters_of("90M"), parameters_of("1.5b")) == (90_000_000, 1_500_000_000)
    for text in ("", "7", "M", "xB", "-1B", "infB"):
        with pytest.raises(ValueError, match="no number of parameters"):
            parameters_of(text)


def test_runs_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    results = interleaved(
        {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"},  # type: ignore[misc, func-returns-value]
        rounds=3,
    )
    assert "".join(order) == "abababab"
    assert results == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}
    assert medians(results) == {"a": 5.0, "b": 6.0}


def test_decoding_counts_while_all_decode() -> None:
    """From 2 s, when the second has its first token, to 4 s, when the first is done: 2 + 2 tokens."""
    assert decode_rate([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0, 6.0]]) == 2.0


@pytest.mark.parametrize(("bound", "met"), [("at most", [True, True, False]), ("at least", [False, True, True])])
def test_targets(bound: str, met: list[bool]) -> None:
    found = [Figure(name="", value=v, unit="", bound=bound, target=2.0).met for v in (1.0, 2.0, 3.0)]  # type: ignore[arg-type]
    assert found == met


def test_a_slot_switches_between_models_and_moves_their_bytes(models: list[BenchModel]) -> None:
    with open_slot(models, device="cpu", dtype="float32", residents=1) as slot:
        for model in (*slot.models, *slot.models):
            slot.switch(model)
            slot.weights.settle()
            assert slot.weights.resident_models == (model.name,)
            assert model.host is not None
            shard = model.skeleton.shards[1]
            embedding = next(iter(model.skeleton.model.parameters()))
            assert embedding.data_ptr() == slot.buffer.data_ptr()
            assert slot.buffer.count_nonzero() >= shard.of(model.host).count_nonzero()


def test_a_slot_that_moves_nothing_binds_all_the_same(models: list[BenchModel]) -> None:
    with open_slot(models, device="cpu", dtype="float32", residents=1, moves=False) as slot:
        before = slot.buffer.clone()
        slot.switch(slot.models[0])
        assert slot.buffer.equal(before)
        assert all(parameter.device.type == "cpu" for parameter in slot.models[0].skeleton.model.parameters())


def test_a_prefetched_model_is_not_loaded_again(models: list[BenchModel]) -> None:
    with open_slot(models, device="cpu", dtype="float32", residents=2) as slot:
        running, other = slot.models
        slot.switch(running)
        slot.load(other, keep=running.name)
        slot.switch(other)
        slot.weights.await_all(other)
        slot.weights.settle()
        assert slot.weights.loads_total == 2
        assert slot.weights.resident_models == tuple(sorted((running.name, other.name)))


def test_switch_figures(models: list[BenchModel]) -> None:
    switch = measure_switch(models, device="cpu", dtype="float32", rounds=2)
    assert switch.value == pytest.approx(switch.details["switch_s"] / switch.details["copy_s"])
    assert switch.details["bytes"] >= models[0].weights_bytes
    prefetch = measure_prefetch(models, device="cpu", dtype="float32", rounds=2)
    assert prefetch.value == pytest.approx(prefetch.details["switch_s"] / prefetch.details["copy_s"])
    control = measure_control(models, device="cpu", dtype="float32", rounds=2)
    assert control.details["parts"] == TINY.layers + 2
    assert 0 < control.details["best_ms"] <= control.value


@pytest.mark.parametrize("balanced", [False, True])
def test_layerwise_start(models: list[BenchModel], balanced: bool) -> None:
    found = measure_layerwise(models, device="cpu", dtype="float32", rounds=1, balanced=balanced)
    assert found.value == pytest.approx(1 - found.details["layerwise_s"] / found.details["load_then_run_s"])
    assert 0 <= found.details["most"] < 1
    assert ("as long as" in found.name) is balanced


def test_a_paced_wire_takes_its_time_and_moves_the_bytes() -> None:
    source, target = torch.arange(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    stream = PacedStream(ThreadStream("inner"), 20_000.0)
    times_s = figures.seconds(lambda: stream.submit([Copy(source, target)]).wait(), torch.device("cpu"))
    stream.close()
    assert times_s >= 0.05
    assert target.equal(source)


@pytest.mark.slow
def test_decode_against_transformers(models: list[BenchModel]) -> None:
    found = measure_decode(models, device="cpu", dtype="float32", rounds=1)
    assert found.value == pytest.approx(
        found.details["tidepool_tokens_per_s"] / found.details["transformers_tokens_per_s"]
    )


def test_the_figures_asked_for_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(name: str, *_: object) -> Figure:
        measured.append(name)
        return Figure(name=name, value=1.0, unit="", bound="at most", target=1.0)

    monkeypatch.setattr("ops.profiling.table._measure", measure)
    monkeypatch.setattr("ops.profiling.table.build_checkpoints", lambda *_, **__: [])
    settings = BenchSettings(device="cpu", dtype="float32", parameters=[1, 1], names=["fragmentation", "switch"])
    reported: list[tuple[str, int, int]] = []
    found = measure_figures(settings, lambda *what: reported.append(what))
    assert [figure.name for figure in found] == measured == ["switch", "fragmentation"]
    assert reported[1:] == [("switch", 0, 2), ("fragmentation", 1, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--figures", "speed"], f"unknown figure speed; there are {', '.join(NAMES)}"),
        (["--models", "90M"], "at least two models"),
        (["--models", "many,90M"], "no number of parameters"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["node", "bench", *options])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_the_table_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.profiling.table.FRAGMENTATION_STEPS", 200)
    arguments = ["node", "bench", "--figures", "fragmentation", "--models", "1M,1M", "--rounds", "1"]
    for extra in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *extra])
        assert ended.value.code in (0, None)
    table, _, answer = capsys.readouterr().out.partition("{")
    assert "fragmentation of the KV cache" in table
    [figure] = json.loads("{" + answer)["figures"]
    assert figure["met"] is True
    assert 0 < figure["value"] < figure["target"] == 0.2
