"""Which GPUs a process sees, by the names it was given."""

import pytest

from dataplane.engines.core.devices import visible_gpus
from dataplane.protocol.errors import ModelLoadError


def test_gpus_are_named_as_the_parent_sees_them() -> None:
    assert visible_gpus([3], {}) == "3"
    assert visible_gpus(range(1, 3), {}) == "1,2"
    assert visible_gpus(range(1, 3), {"CUDA_VISIBLE_DEVICES": "4, GPU-7,MIG-9"}) == "GPU-7,MIG-9"


@pytest.mark.parametrize("visible", ["4,5", "", "4,5,"])
def test_a_gpu_that_the_parent_does_not_see_is_refused(visible: str) -> None:
    with pytest.raises(ModelLoadError, match=f"cuda:2 is not among CUDA_VISIBLE_DEVICES={visible}"):
        visible_gpus([2], {"CUDA_VISIBLE_DEVICES": visible})
