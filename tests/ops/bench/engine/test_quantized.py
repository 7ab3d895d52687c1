"""The benchmark of quantized models: its checkpoints load as quantized ones, and are as small as they should be."""

from pathlib import Path

import pytest

from ops.bench.engine.quantized import FORMATS, GROUP, measure
from ops.profiling.checkpoints import Shape, build_checkpoints


@pytest.mark.parametrize(("form", "most"), [*zip(FORMATS, (0.5, 0.7), strict=True)])
def test_a_quantized_model_is_measured_beside_the_same_in_bfloat16(form: str, most: float, tmp_path: Path) -> None:
    (dense,) = build_checkpoints(tmp_path, [Shape(hidden=8 * GROUP, layers=6, head_dim=GROUP)], "bfloat16")
    found = measure(dense, form, tmp_path, rounds=1)
    assert found["format"] == form
    assert 0.25 < found["bytes"] < most  # embeddings stay dense
    assert min(found["switch"], found["step"]) > 0
