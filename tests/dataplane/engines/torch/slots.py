"""Slots that are just large enough."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dataplane.engines.torch.model.parallel import Rank, Unconnected
from dataplane.engines.torch.model.skeleton import build_skeleton
from dataplane.engines.torch.settings import TorchEngineSettings

SLAB_BYTES = 2**14


def slot_for_one(folders: Iterable[Path], *, kv_bytes: int, **changes: Any) -> TorchEngineSettings:
    """A slot whose arena holds the largest of the models, or a rank's part of it. KV that is too small for a second one
    keeps it so.
    """
    given: dict[str, Any] = {"slab_bytes": SLAB_BYTES, **changes}
    dtype = torch.bfloat16 if given.get("dtype") == "bfloat16" else torch.float32
    rank = Rank(index=0, count=given.get("ranks", 1), collectives=Unconnected())
    skeletons = [build_skeleton(folder, dtype, torch.device("cpu"), rank=rank) for folder in folders]
    slabs = max(skeleton.slabs(given["slab_bytes"]) for skeleton in skeletons)
    return TorchEngineSettings(weights_bytes=slabs * given["slab_bytes"], kv_bytes=kv_bytes, **given)
