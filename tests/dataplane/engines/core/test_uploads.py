"""Arrays arrive as they were, in one copy for which nobody waits."""

from typing import Any

import numpy as np
import torch

from dataplane.engines.core.uploads import upload
from tests.dataplane.engines.fake_device import DEVICE, FakeTensor, counted

ARRAYS: tuple[np.ndarray[Any, Any], ...] = (
    np.arange(6).reshape(3, 2),
    np.arange(12).reshape(3, 4).T,
    np.zeros((2, 0), dtype=np.int64),
    np.array([0.5, 2.5, -1.0], dtype=np.float32),
    np.array([[True, False, True]]),
)


def test_arrays_of_all_kinds_arrive_on_a_device_and_on_a_cpu() -> None:
    with counted() as waits:
        there = upload(DEVICE, *ARRAYS)
        arrived = [one.inner for one in there if isinstance(one, FakeTensor)]
    assert waits == []
    for made in (arrived, upload(torch.device("cpu"), *ARRAYS)):
        assert len(made) == len(ARRAYS)
        for one, array in zip(made, ARRAYS, strict=True):
            assert np.array_equal(one.numpy(), array)
            assert one.numpy().dtype == array.dtype
