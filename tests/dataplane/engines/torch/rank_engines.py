"""Engines for tiny models on several ranks."""

from pathlib import Path
from typing import Any

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from tests.dataplane.engines.torch.deep import Ticks
from tests.dataplane.engines.torch.rank_threads import start_threads


def engine_of(ranks: int, cache: Path, **changes: Any) -> TorchEngine:
    """An engine whose other ranks are threads."""
    given: dict[str, Any] = {
        "weights_bytes": 2**19,
        "kv_bytes": 2**17,
        "slab_bytes": 2**14,
        "prefill_tokens_per_step_max": 16,
        **changes,
    }
    settings = TorchEngineSettings(ranks=ranks, cache_folder=cache, **given)
    return TorchEngine(settings, Ticks(), other_ranks=start_threads(ranks - 1))
