"""The GPU benchmark, whose parts run on a CPU as well, with tiny models."""

import pytest

from ops.bench.engine import gpu
from ops.profiling.checkpoints import BenchModel, Shape, build_checkpoints

TINY = Shape(hidden=64, layers=2, head_dim=16)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[BenchModel]:
    return build_checkpoints(tmp_path_factory.mktemp("models"), [TINY, TINY], "bfloat16", context_tokens=256)


def test_decode_steps_are_measured_against_the_bytes_that_they_read(
    models: list[BenchModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "SEQUENCES", (1, 3))
    fast, slow = (
        list(gpu.measure_decodes(models[0], TINY, device="cpu", rounds=1, prompt_tokens=20, bytes_per_s=rate))
        for rate in (2e10, 1e10)
    )
    assert [row["sequences"] for row in fast] == [1, 3]
    for one, other in zip(fast, slow, strict=True):
        assert one["floor"] == pytest.approx(2 * other["floor"])
        assert one["share"] == pytest.approx(one["graphs"] / one["floor"])
        assert min(one["graphs"], one["no_graphs"]) > 0
    kv_bytes = 2 * 2 * 1 * 16 * 2 * 20
    assert slow[1]["floor"] == pytest.approx(3 * 1e10 / (models[0].weights_bytes + 3 * kv_bytes))


def test_products_of_packed_weights_are_measured_beside_dense_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LAYERS", 2)
    monkeypatch.setattr(gpu, "ROWS", (1, 70))
    found = list(gpu.measure_products(device="cpu", rounds=1, outputs=256, inputs=128))
    assert [(row["format"], row["rows"]) for row in found] == [(form, n) for form in gpu.FORMATS for n in (1, 70)]
    assert min(row["packed"] for row in found) > 0


def test_what_a_start_hides_is_told_where_something_can_be_hidden(
    models: list[BenchModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PROMPTS", (16,))
    ((some,), (none,)) = (list(gpu.measure_starts(models, load_s, device="cpu", rounds=1)) for load_s in (0.0, 1e9))
    assert (some["prompt_tokens"], none["hidden"]) == (16, None)
    assert (
        some["hidden"] == pytest.approx((some["whole_s"] - some["layerwise_s"]) / (some["whole_s"] - some["run_s"]))
        or some["whole_s"] <= some["run_s"]
    )
