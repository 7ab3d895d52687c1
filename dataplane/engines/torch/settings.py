"""The torch engine's settings: one frozen record per slot, checked when it is made."""

from dataclasses import dataclass, field
from typing import Literal

from dataplane.turns.schedule import TurnSettings


@dataclass(frozen=True, kw_only=True)
class TorchEngineSettings:
    """What a slot gives its engine.

    `device` is any torch device name ("cpu", "cuda", "cuda:1"). `weights_bytes` is the size of the one flat weight
    buffer, which must hold the largest model; `kv_bytes_per_gpu` the KV cache on each GPU of an instance. A step runs
    at most `batch_max` sequences and prefills at most `prefill_tokens_per_step_max` tokens.
    """

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    weights_bytes: int
    kv_bytes_per_gpu: int
    block_tokens: int = 16
    prefill_tokens_per_step_max: int = 512
    batch_max: int = 32
    turns: TurnSettings = field(default_factory=TurnSettings)

    def __post_init__(self) -> None:
        """Refuse sizes that cannot work.

        Raises:
            ValueError: names the field.
        """
        sizes = ("weights_bytes", "kv_bytes_per_gpu", "block_tokens", "prefill_tokens_per_step_max", "batch_max")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
