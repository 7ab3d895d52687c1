"""The torch engine's settings: one frozen record per slot, checked when it is made."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dataplane.engines.core.kv import KvEvents
from dataplane.engines.core.pressure import KvPressure
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.scheduling.schedule import TurnSettings

SLAB_BYTES_MIN, SLAB_BYTES_MAX = 2**17, 2**25
SLABS_WANTED = 512


@dataclass(frozen=True, kw_only=True)
class TorchEngineSettings:
    """What a slot gives its engine.

    `device` is any torch device name ("cpu", "cuda", "cuda:1"). The arena has a region of `weights_bytes` for weights
    only, enough for the largest model, and one of `kv_bytes` for KV, which weights may borrow; `host_kv_bytes` of host
    memory hold preempted KV, in `host_kv_file` if other slots shall read it. `slab_bytes` None chooses.
    `cache_folder` is the node's model cache of `cache_bytes`; without one, weights are in private memory. A model that
    finds no memory there for `host_wait_max_s` fails.
    A step runs at most `batch_max` sequences and prefills at most `prefill_tokens_per_step_max` tokens. `prefetch`
    loads the next model early; `layerwise` starts a model while its later layers are loaded; on a `prefill_only` slot a
    request leaves after its first token, to be decoded by another slot, which waits for its KV by `kv_events`: on the
    device by an interprocess event, if it has such, or on the host. `prefix_cache`: whether KV is kept for requests
    whose tokens begin alike; `cuda_graphs`: whether decode steps of a single GPU run as CUDA graphs.
    `host_link_bytes_per_s`: the bandwidth between host memory and the device in each direction, if known; None:
    measured. `kv_pressure`: how KV pressure is handled; `remap`: which layers are offloaded then.
    A slot of several GPUs has as many `ranks`: processes that run each model together, with a part of its weights and
    of its KV each, on consecutive devices from `device` on. All sizes but `cache_bytes` are then those of one rank. A
    rank that does not take part in a step for `ranks_timeout_s` ends the worker.
    LoRA adapters take device memory beside the arena as they are loaded, `adapters_bytes` at most, and have ranks up to
    `adapter_rank_max`.
    """

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    weights_bytes: int
    kv_bytes: int
    host_kv_bytes: int = 0
    host_kv_file: Path | None = None
    slab_bytes: int | None = None
    cache_folder: Path | None = None
    cache_bytes: int = 2**40
    host_wait_max_s: float = 60.0
    block_tokens: int = 16
    prefill_tokens_per_step_max: int = 512
    batch_max: int = 32
    prefetch: bool = True
    layerwise: bool = True
    prefill_only: bool = False
    kv_events: KvEvents = "host"
    prefix_cache: bool = True
    cuda_graphs: bool = True
    copy_threads: int = 1
    host_link_bytes_per_s: float | None = None
    kv_pressure: KvPressure = "auto"
    remap: RemapSettings = field(default_factory=RemapSettings)
    turns: TurnSettings = field(default_factory=TurnSettings)
    ranks: int = 1
    ranks_timeout_s: float = 60.0
    adapters_bytes: int = 2**28
    adapter_rank_max: int = 64

    def __post_init__(self) -> None:
        """Refuse sizes that cannot work.

        Raises:
            ValueError: names the field.
        """
        sizes = (
            "weights_bytes",
            "kv_bytes",
            "cache_bytes",
            "block_tokens",
            "prefill_tokens_per_step_max",
            "batch_max",
            "copy_threads",
            "ranks",
            "adapter_rank_max",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.host_link_bytes_per_s is not None and not self.host_link_bytes_per_s > 0:
            raise ValueError(f"host_link_bytes_per_s must be over 0, got {self.host_link_bytes_per_s}")
        if not self.ranks_timeout_s > 0:
            raise ValueError(f"ranks_timeout_s must be over 0, got {self.ranks_timeout_s}")
        if self.ranks > 1 and self.cache_folder is None:
            raise ValueError(f"cache_folder must be set for {self.ranks} ranks: they share host copies there")
        for name in ("host_kv_bytes", "adapters_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.slab_bytes is not None and (self.slab_bytes < 256 or self.slab_bytes % 256):
            raise ValueError(f"slab_bytes must be a multiple of 256, got {self.slab_bytes}")
        if self.prefill_only and self.host_kv_file is None:
            raise ValueError("prefill_only needs host_kv_file: the next slot reads the KV there")
        if self.prefill_only and self.host_kv_bytes < self.slab_size_bytes:
            raise ValueError(f"host_kv_bytes must hold a slab of {self.slab_size_bytes}, got {self.host_kv_bytes}")

    @property
    def announcement_refusal(self) -> str | None:
        """Why KV is announced to other slots when it has been transferred, and not while it is; None: it is not so."""
        if self.kv_events == "off":
            return "kv_events=off"
        return None if self.ranks == 1 else f"the slot has {self.ranks} ranks, and other slots know the first one only"

    @property
    def slab_size_bytes(self) -> int:
        """`slab_bytes`, or a power of two that cuts the arena into some 512 slabs."""
        if self.slab_bytes is not None:
            return self.slab_bytes
        wanted = max(1, (self.weights_bytes + self.kv_bytes) // SLABS_WANTED)
        return min(SLAB_BYTES_MAX, max(SLAB_BYTES_MIN, 1 << (wanted.bit_length() - 1)))
