"""The benchmark of adapters: steps with several of them are measured beside steps without, and they are small."""

from pathlib import Path

from ops.bench.engine.adapters import measure
from ops.profiling.checkpoints import Shape, build_checkpoints


def test_steps_with_adapters_are_measured_beside_steps_without(tmp_path: Path) -> None:
    (model,) = build_checkpoints(tmp_path, [Shape(hidden=256, layers=2, head_dim=64)], "float32")
    found = measure(model, tmp_path, counts=[1, 2], rank=4, batch=3, rounds=1)
    assert set(found["steps"]) == {"0", "1", "2"}
    assert found["steps"]["0"] == 1
    assert min(found["steps"].values()) > 0
    assert 0 < found["bytes"] < 0.1
