"""Slots that offload layers: small models of several layers, little KV, and their undisturbed tokens."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dataplane.engines.core.pressure_handler import KvPressureHandler
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.interface import EngineRequest, PoolStats
from dataplane.engines.torch.copies.base import CopyStream
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.memory.kv import SequenceKv
from dataplane.engines.torch.memory.models import TorchModel
from dataplane.engines.torch.sequences import TokenSequence
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.torch.drive import Gathered, request, stepped
from tests.dataplane.engines.torch.rank_threads import start_threads
from tests.dataplane.engines.torch.slots import slot_for_one
from tests.dataplane.engines.torch.tiny import VOCABULARY, spec_of

LAYERS = 7
SLAB_BYTES = 2**13
KV_SLABS = 12
QUICK = TurnSettings(decode=DecodeSettings(quota_min_s=0.001, quota_max_s=0.005))
EAGER = RemapSettings(capped=False, settle_s=0.0, spare_layers=0.0)
"""Gives up layers whether or not that can be hidden, and takes them back at once."""
Deep = Callable[[str], Path]
"""The folder of an architecture's checkpoint with `LAYERS` layers."""
Undisturbed = Callable[[Sequence[EngineRequest]], dict[str, tuple[int, ...]]]
"""Tokens by request: one request at a time on a slot that is large enough."""


class Ticks:
    """An engine's clock on which every look takes a tenth of a millisecond: what it decides by the times of its steps
    does not depend on the machine, nor on what else the machine does.
    """

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += 1e-4
        return self._now_s


def slot(deep: Deep, names: Sequence[str], *, models_there: int, **changes: Any) -> TorchEngineSettings:
    """Weights for so many of the models, and little KV."""
    given: dict[str, Any] = {
        "slab_bytes": SLAB_BYTES,
        "block_tokens": 4,
        "host_kv_bytes": 2**22,
        "turns": QUICK,
        "kv_pressure": "remap",
        "remap": EAGER,
        **changes,
    }
    ranks = {name: given[name] for name in ("ranks", "cache_folder") if name in given}
    one = slot_for_one([deep(name) for name in names], kv_bytes=KV_SLABS * SLAB_BYTES, slab_bytes=SLAB_BYTES, **ranks)
    return TorchEngineSettings(weights_bytes=models_there * one.weights_bytes, kv_bytes=KV_SLABS * SLAB_BYTES, **given)


def loaded(
    deep: Deep,
    names: Sequence[str],
    settings: TorchEngineSettings,
    make_stream: Callable[[str], CopyStream] | None = None,
    clock: Callable[[], float] | None = None,
) -> TorchEngine:
    other_ranks = start_threads(settings.ranks - 1) if settings.ranks > 1 else None
    engine = TorchEngine(settings, clock or Ticks(), make_stream, other_ranks=other_ranks)
    for name in names:
        engine.load(name, spec_of(name, deep(name)))
    return engine


def wants(names: Sequence[str], each: int, *, max_tokens: int = 8) -> list[EngineRequest]:
    chance = random.Random(1)
    return [
        request(
            f"{name}-{number}",
            [chance.randrange(3, VOCABULARY) for _ in range(5 + 4 * (number % 5))],
            instance_id=name,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for number in range(each)
        for name in names
    ]


def pool_of(engine: TorchEngine) -> PoolStats:
    pool = engine.stats().pool
    assert pool is not None
    return pool


def decoding_here(engine: TorchEngine, name: str) -> Sequence[TokenSequence]:
    """The model's sequences that are past their prefill and whose KV is on the device."""
    return engine.models[name].decoding_here


def pressure_of(engine: TorchEngine) -> KvPressureHandler[TorchModel, SequenceKv]:
    return engine.pressure


def run_dry(engine: TorchEngine, gathered: Gathered, *, steps_max: int = 20_000) -> int:
    """Step to the end, checking the bookkeeping on the way; how many layers were offloaded at most."""
    most = 0
    for number in range(steps_max):
        if not engine.has_work():
            engine.check()
            return most
        gathered.take(stepped(engine))
        most = max(most, sum(pool_of(engine).offloaded_layers.values()))
        if number % 4 == 0:
            engine.check()
    raise AssertionError(f"not done after {steps_max} steps")


def steps_until(engine: TorchEngine, gathered: Gathered, reached: Callable[[], bool]) -> None:
    for _ in range(5000):
        gathered.take(stepped(engine))
        if reached():
            return
    raise AssertionError("never reached")


def drain_outputs(engine: TorchEngine) -> list[Any]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs
