"""The Protocol every engine meets, and the records that cross it. One conformance suite tests them all.

An engine drives one slot. It is single-threaded and knows no sockets: the worker process feeds it commands between
steps. One `step` is one forward pass (or one span of replayed time) of the model whose turn it is; the engine asks the
pure policies in `dataplane.turns` which one that is.
"""

from dataclasses import dataclass, field
from typing import Protocol

from dataplane.messages import FinishReason, ModelSpec, Tier


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A tokenized request. `generated` are tokens made before (elsewhere, or before a worker was lost): the engine
    continues after them, and `max_tokens` counts them. Sampling at position p depends on (seed, p) alone, so a
    request continued anywhere gives the same tokens.
    """

    request_id: str
    instance_id: str
    tier: Tier
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineOutput:
    """New tokens of one request. A last output has `finish_reason` or `error`; nothing follows it.
    The end-of-sequence token itself is never in `token_ids`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class InstanceStats:
    """Load of one instance; the meanings are those of `messages.InstanceReport`."""

    instance_id: str
    kv_used_bytes: int
    kv_capacity_bytes: int
    remaining_tokens: int
    running: int
    waiting: int


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Load of a slot. `resident_models`: whose weights are in the arena; `switches_total`: since start."""

    instances: tuple[InstanceStats, ...] = ()
    resident_models: tuple[str, ...] = ()
    switches_total: int = 0
    steps_total: int = 0
    tokens_total: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """What a worker drives."""

    def load(self, instance_id: str, model: ModelSpec, *, gpus: int = 1) -> None:
        """Take an instance in: read weights to host memory, give it its KV cache, a share for each of its GPUs.

        Raises:
            dataplane.errors.ModelLoadError: the checkpoint cannot be used, or does not fit; nothing is kept of it.
        """

    def unload(self, instance_id: str) -> None:
        """Forget an instance and free its memory. Its requests end with an `error` output at the next step."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            dataplane.errors.UnknownInstanceError: the instance is not loaded.
            dataplane.errors.ContextLengthError: prompt + max_tokens exceed context or the instance's whole KV cache.
        """

    def cancel(self, request_id: str) -> None:
        """Drop a request and free what it holds, now. Unknown ids are ignored: it may just have ended."""

    def step(self) -> list[EngineOutput]:
        """Run one step. Empty when there is nothing to do (or, for a replay, nothing has happened yet)."""

    def has_work(self) -> bool:
        """Whether a request is running or waiting."""

    def stats(self) -> EngineStats:
        """The load right now."""
