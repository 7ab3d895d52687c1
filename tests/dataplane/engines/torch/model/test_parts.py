"""The modules of a model are built by one thread at a time."""

import threading
from typing import Any

import pytest
import torch

from dataplane.engines.torch.model import parts


def test_the_default_data_type_is_that_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a slot may be threads, in tests, and an agent checks models on several."""
    seen: list[torch.dtype] = []

    class Builder:
        @staticmethod
        def from_config(other: threading.Thread | None, *, dtype: torch.dtype, **_: Any) -> None:
            torch.set_default_dtype(dtype)
            try:
                if other is not None:
                    other.start()
                    other.join(0.1)
                seen.append(torch.get_default_dtype())
            finally:
                torch.set_default_dtype(torch.float32)

    monkeypatch.setattr(parts, "_builder", lambda *_: Builder)
    other = threading.Thread(target=parts._on_meta, args=(None, {}, "generate", torch.float32))
    parts._on_meta(other, {}, "generate", torch.bfloat16)
    other.join()
    assert seen == [torch.bfloat16, torch.float32]
