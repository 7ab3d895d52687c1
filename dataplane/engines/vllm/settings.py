"""The vLLM engine's settings: one frozen record per slot, checked when it is made."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dataplane.checkpoints.adapters import ADAPTER_RANK_MAX
from dataplane.engines.core.devices import HostSpan
from dataplane.scheduling.schedule import TurnSettings

STEP_SHARE = 0.1
"""Share of a GPU's memory that KV leaves to activations, sampling and CUDA graphs, as vLLM does by itself."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Of a number in a slot's data type."""


@dataclass(frozen=True, kw_only=True)
class VllmEngineSettings:
    """What a slot gives its engine.

    Weights of the models that are awake take at most `weights_bytes`. `kv_bytes` are divided into `awake_max` equal KV
    memories, one for each model that may be awake at once. `models_max` 1: the slot serves one model alone, which vLLM
    may compile and capture. More: they take turns, without CUDA graphs, which contain addresses; the weights of those
    that sleep are in `cache_folder`, the node's model cache of `cache_bytes`, or without one in private memory. A step
    runs at most `batch_max` sequences and prefills at most `prefill_tokens_per_step_max` tokens. `block_tokens` None:
    vLLM's choice. `prefix_cache`: whether vLLM keeps KV for requests whose tokens begin alike, until the model sleeps.
    `ranks`: GPUs that run the slot's one model together, by vLLM's tensor parallelism; `weights_bytes` and `kv_bytes`
    are of each. `spare_to_kv`: the slot's one model gives what it leaves of `weights_bytes` to KV, on a GPU without the
    `STEP_SHARE` of the memory that steps need. `async_scheduling`: on a GPU, the next step is submitted while one runs,
    unless models take turns: the step submitted early would run in another's. `adapters_max`: LoRA adapters for which
    each model reserves memory, of ranks up to `adapter_rank_max`; one that is loaded for an adapter reserves that of
    one at least. `span`: where the ranks are of several hosts, an equal part of each; such a slot has no adapters.
    """

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    weights_bytes: int
    kv_bytes: int
    models_max: int = 1
    awake_max: int = 1
    cache_folder: Path | None = None
    cache_bytes: int = 2**40
    block_tokens: int | None = None
    prefill_tokens_per_step_max: int = 2048
    batch_max: int = 32
    turns: TurnSettings = field(default_factory=TurnSettings)
    prefix_cache: bool = True
    spare_to_kv: bool = False
    async_scheduling: bool = True
    ranks: int = 1
    adapters_max: int = 0
    adapter_rank_max: int = 16
    span: HostSpan | None = None
    prefetch: Literal[False] = False
    prefill_only: Literal[False] = False

    def __post_init__(self) -> None:
        """Refuse sizes that cannot work.

        Raises:
            ValueError: names the field.
        """
        sizes = (
            "weights_bytes",
            "kv_bytes",
            "models_max",
            "awake_max",
            "prefill_tokens_per_step_max",
            "batch_max",
            "ranks",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.adapters_max < 0:
            raise ValueError(f"adapters_max must be at least 0, got {self.adapters_max}")
        if self.adapters_max and self.models_max > 1:
            raise ValueError(f"adapters_max needs models_max of 1, got {self.models_max}: their memory does not sleep")
        if not 1 <= self.adapter_rank_max <= ADAPTER_RANK_MAX:
            raise ValueError(f"adapter_rank_max must be 1 to {ADAPTER_RANK_MAX}, got {self.adapter_rank_max}")
        if self.awake_max > self.models_max:
            raise ValueError(f"awake_max must be at most models_max={self.models_max}, got {self.awake_max}")
        if self.spare_to_kv and self.models_max > 1:
            raise ValueError(f"spare_to_kv needs models_max of 1, got {self.models_max}: others need the memory too")
        if self.ranks > 1 and self.models_max > 1:
            raise ValueError(f"ranks above 1 need models_max of 1, got {self.models_max}: ranks do not sleep in step")

    def pool_bytes(self, stored_bytes: int) -> int:
        """KV memory of one model whose weights, with memory for its adapters, have that size."""
        if not self.spare_to_kv:
            return self.kv_bytes // self.awake_max
        memory_bytes = self.weights_bytes + self.kv_bytes
        kept_bytes = 0 if self.device == "cpu" else int(STEP_SHARE * memory_bytes)
        return max(self.kv_bytes, memory_bytes - kept_bytes - stored_bytes)

    @property
    def item_bytes(self) -> int:
        """The bytes of a number in `dtype`."""
        return ITEM_BYTES[self.dtype]

    @property
    def overlapped(self) -> bool:
        """Whether a step is submitted while the one before it runs."""
        return self.async_scheduling and self.models_max == 1 and self.device != "cpu"

    @property
    def eager(self) -> bool:
        """Whether vLLM must neither compile nor capture: if memory moves, and on a CPU (which may lack a compiler)."""
        return self.models_max > 1 or self.device == "cpu"
