"""The Protocol every engine meets, and the records that cross it. One conformance suite tests them all.

An engine drives one slot. It is single-threaded but for `prepare`, and knows no sockets: the worker process feeds it
commands between steps. One `step` is at most one forward pass (or one span of replayed time) of the model whose turn it
is; the engine asks the pure policies in `dataplane.scheduling` which one that is.
"""

from typing import Literal, Protocol

from msgspec import Struct, field

from dataplane.protocol.messages import FinishReason, ModelSpec
from dataplane.protocol.tiers import Objective, Tier
from dataplane.scheduling.pace import PrefillPace
from dataplane.scheduling.tiers import TIER_OBJECTIVES


class KvHandle(Struct, frozen=True, kw_only=True):
    """Where the KV of a prefilled request lies: `blocks` of one shape in the host KV file of the slot that made it.

    `shape` is (layers, kv_heads, head_dim, block_tokens, itemsize); the first `tokens` tokens have keys and values.
    """

    file: str
    slab_bytes: int
    shape: tuple[int, int, int, int, int]
    blocks: tuple[int, ...]
    tokens: int


class EngineRequest(Struct, frozen=True, kw_only=True):
    """A tokenized request. `generated` are tokens made before (elsewhere, or before a worker was lost): the engine
    continues after them, and `max_tokens` counts them. Sampling at position p depends on (seed, p) alone, so a
    request continued anywhere gives the same tokens. `objective`: what it is promised, if not what its tier is. `kv`
    spares their prefill where it can still be read. `trace`: the
    traceparent of the agent's span, where requests are traced.
    """

    request_id: str
    instance_id: str
    tier: Tier
    objective: Objective | None = None
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    kv: KvHandle | None = None
    trace: str | None = None

    @property
    def promise(self) -> Objective:
        """When its tokens are due."""
        return self.objective or TIER_OBJECTIVES[self.tier]


class EngineOutput(Struct, frozen=True, kw_only=True):
    """New tokens of one request. A last output has `finish_reason` or `error`; nothing follows it.
    The end-of-sequence token itself is never in `token_ids`. With `kv` the request is handed over: it left this engine
    to go on elsewhere, and its KV stays until `Engine.release`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    kv: KvHandle | None = None


class InstanceStats(Struct, frozen=True, kw_only=True):
    """Load of one instance; the meanings are those of `messages.InstanceReport`. The capacity is what it uses and what
    it could take now; `kv_tokens_max` is what one request alone on the slot could fill.
    """

    instance_id: str
    kv_tokens_max: int
    kv_used_bytes: int
    kv_capacity_bytes: int
    remaining_tokens: int
    running: int
    waiting: int


class TurnRecord(Struct, frozen=True, kw_only=True):
    """A turn that ended: what ran, from when to when (engine clock), and whether it began by a switch. `tokens`: made
    in it, one for each prompt that a prefill ended; `prompt_tokens`: of those prompts.
    """

    kind: Literal["prefill", "decode"]
    model: str
    started_s: float
    ended_s: float
    tokens: int
    prompt_tokens: int
    switched: bool


class KvShapeStats(Struct, frozen=True, kw_only=True):
    """KV of one shape in one memory. `held_bytes`: of the slabs it holds; `moving_bytes`: waiting for a transfer."""

    shape: str
    used_bytes: int
    held_bytes: int
    moving_bytes: int


class PoolStats(Struct, frozen=True, kw_only=True):
    """A slot that switches. `load` is alpha, the reciprocal of the estimated attainment (Aegaeon eq. 3): above 1 the
    slot cannot keep up. `turns` are the last ones, oldest first, and `prefill_pace` is what they show; all times are on
    the engine's clock, now `now_s`.
    `weights_bytes_per_s`: how fast weights come in, by which switches are priced, where that is measured; `unpinned`:
    how much host memory CUDA refused to pin, and why, if it did. `given_up`: layers whose memory KV has, by model.
    Since the start: `relief`: what was done when KV had no room; `not_remapped`: why no layers were given up then;
    `layers_moved`: lent and taken back.
    """

    now_s: float
    running_model: str | None = None
    next_model: str | None = None
    arriving_models: tuple[str, ...] = ()
    load: float = 0.0
    prefills_waiting: int = 0
    slabs: dict[str, int] = field(default_factory=dict)
    kv: tuple[KvShapeStats, ...] = ()
    host_kv: tuple[KvShapeStats, ...] = ()
    host_cache_bytes: int = 0
    weights_bytes_per_s: float | None = None
    unpinned: str | None = None
    given_up: dict[str, int] = field(default_factory=dict)
    relief: dict[str, int] = field(default_factory=dict)
    not_remapped: dict[str, int] = field(default_factory=dict)
    layers_moved: dict[str, int] = field(default_factory=dict)
    turns: tuple[TurnRecord, ...] = ()
    prefill_pace: PrefillPace = PrefillPace()


class EngineStats(Struct, frozen=True, kw_only=True):
    """Load of a slot. `resident_models`: whose weights are on it, whole. Totals are since start; so are those in
    `extra`: `preemptions`, `recomputed` (of KV that had no room), `swapped_out`, `swapped_in` (of one request's KV).
    """

    instances: tuple[InstanceStats, ...] = ()
    resident_models: tuple[str, ...] = ()
    switches_total: int = 0
    steps_total: int = 0
    tokens_total: int = 0
    pool: PoolStats | None = None
    extra: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """What a worker drives. Its owner calls one method at a time; `prepare` alone may run beside them."""

    def prepare(self, model: ModelSpec) -> None:
        """Do the slow part of a `load`: read the model's weights to host memory. May run on another thread while the
        owner goes on stepping; harmless when done twice. What is prepared and never loaded stays, until host memory is
        short.

        Raises:
            ModelLoadError: the checkpoint cannot be used, or can never fit; nothing is kept of it.
            dataplane.memory.model_cache.HostMemoryError: on another thread than the owner's: host memory has no room
                for it now; a later try may find some.
        """

    def load(self, instance_id: str, model: ModelSpec, *, gpus: int = 1) -> None:
        """Take an instance in. Quick after `prepare`; without it, that is done first, and where host memory has no room
        now, the weights are read before the model's first turn. All instances of a slot share its KV memory, and those
        of one model its weights.

        Raises:
            ModelLoadError: the id is taken, or the checkpoint cannot be used or can never fit; nothing
                is kept of it.
        """

    def unload(self, instance_id: str) -> None:
        """Forget an instance, and with the last one of its model its weights. Its requests end with an `error` output
        at the next step; the KV of those handed over stays until `release`. Unknown ids are ignored.
        """

    def add(self, request: EngineRequest) -> None:
        """Queue a request; where its `kv` can be read, it goes on from there without a prefill.

        Raises:
            UnknownInstanceError: the instance is not loaded.
            ContextLengthError: prompt + max_tokens exceed the context, or what one request alone on
                the slot could fill (`InstanceStats.kv_tokens_max`).
            BadRequestError: an id in use, an empty prompt, no token wanted, or a token that the model
                does not know.
        """

    def cancel(self, request_id: str) -> None:
        """Drop a request, handed over or not, and free what it holds, now. Nothing more is heard of it. Unknown ids are
        ignored: it may just have ended.
        """

    def release(self, request_id: str) -> None:
        """Free the KV of a request that was handed over. Unknown ids are ignored."""

    def step(self) -> list[EngineOutput]:
        """Run one step, and say what came of it: often nothing, while prompts are long, or weights or KV on their way.
        Nothing here blocks for longer than one forward pass or one transfer. Harmless without work.
        """

    def has_work(self) -> bool:
        """Whether a request is running or waiting, or the end of one is still to be told by `step`."""

    def stats(self) -> EngineStats:
        """The load right now."""
