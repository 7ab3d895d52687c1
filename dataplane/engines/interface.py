"""The Protocol that every engine meets, and the records that cross it. One conformance suite tests all engines.

An engine drives one slot. It is single-threaded except for `prepare`, and knows no sockets: the worker process gives it
commands between steps. One `step` is at most one forward pass (or one span of replayed time) of the model whose turn it
is; the pure policies in `dataplane.scheduling` choose which one that is.
"""

from typing import Literal, Protocol

from msgspec import Struct, field

from dataplane.protocol.messages import Constraint, FinishReason, ModelSpec
from dataplane.protocol.tiers import Objective, Tier
from dataplane.scheduling.pace import PrefillPace
from dataplane.scheduling.tiers import TIER_OBJECTIVES


class KvEvent(Struct, frozen=True, kw_only=True):
    """The end of a transfer of KV that was announced while it was under way: the `number`th use of a `slot` in the
    event table of the slot that computed it (`dataplane.memory.shared_events`), and the handle of its interprocess CUDA
    event, empty if there is none.
    """

    slot: int
    number: int
    device: bytes = b""


class KvHandle(Struct, frozen=True, kw_only=True):
    """The KV of a prefilled request: `blocks` of one shape in the host KV file of the slot that computed it.

    `shape` is (layers, kv_heads, head_dim, block_tokens, itemsize) on each of the slot's `ranks`; the first `tokens`
    tokens have keys and values. `event`: what has to pass before they can be read; None: they are there. Of replayed
    KV, `passes_s` is when that is, by the machine's monotonic clock or that of the simulation.
    """

    file: str
    slab_bytes: int
    shape: tuple[int, int, int, int, int]
    blocks: tuple[int, ...]
    tokens: int
    ranks: int = 1
    event: KvEvent | None = None
    passes_s: float = 0.0


class EngineRequest(Struct, frozen=True, kw_only=True):
    """A tokenized request. `generated`: tokens made before, elsewhere or by a lost worker; the engine continues after
    them, and `max_tokens` counts them. Sampling at position p depends on (seed, p) alone, so that a request continued
    anywhere gives the same tokens. `objective`: its own latency objective, if not that of its tier. `kv`: KV to read
    instead of a prefill, where possible. `trace`: the traceparent of the agent's span, if the request is traced.

    The fields of sampling are those of `messages.Sampling`; penalties count `generated` too. `constraint`: compiled and
    advanced over `generated` by the engine. `cache_salt`: only requests with the same salt share cached prefixes.
    `pooling`: answer with `EngineOutput.values` instead of tokens; `max_tokens` has no effect then.
    """

    request_id: str
    instance_id: str
    tier: Tier
    objective: Objective | None = None
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    constraint: Constraint | None = None
    cache_salt: str = ""
    pooling: bool = False
    kv: KvHandle | None = None
    trace: str | None = None

    @property
    def answer_tokens_max(self) -> int:
        """The most tokens of the answer; none with `pooling`."""
        return 0 if self.pooling else self.max_tokens

    @property
    def promise(self) -> Objective:
        return self.objective or TIER_OBJECTIVES[self.tier]


class TokenScore(Struct, frozen=True, array_like=True):
    """The log probability of a token under the model's raw distribution, and (token id, log probability) of the
    likeliest tokens at its position, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class EngineOutput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request. The last output has `finish_reason` or `error`. The end-of-sequence token itself is
    never in `token_ids`. With `kv` the request has left this engine to continue on another slot, which reads its KV
    here until `Engine.release`. `scores`: of `token_ids`, if asked for. `cached_tokens`: tokens of the prompt whose KV
    was cached, in the output of the first token. `values`: the whole answer of a request with `pooling`. `invalid`: the
    error is the request's own, and no engine could answer it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    cached_tokens: int = 0
    values: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    invalid: bool = False
    kv: KvHandle | None = None


class InstanceStats(Struct, frozen=True, kw_only=True):
    """Load of one instance; the fields are those of `messages.InstanceReport`. The capacity is the KV memory it uses
    and could allocate now; `kv_tokens_max` is what one request alone on the slot could fill; `prefill_s`, `decode_s`:
    of the steps of `reference_steps`, as observed; None: not yet.
    """

    instance_id: str
    kv_tokens_max: int
    kv_used_bytes: int
    kv_capacity_bytes: int
    remaining_tokens: int
    running: int
    waiting: int
    prefill_s: float | None = None
    decode_s: float | None = None


SliceKind = Literal["prefill", "decode", "mixed"]


class TimeSlice(Struct, frozen=True, kw_only=True):
    """A time slice that ended: what ran, from when to when (engine clock), and whether it began with a switch.
    `tokens`: made in it, one for each of the `prompts` whose prefill it completed; `prompt_tokens`: of those, not
    cached ones. `switch_s`: how long a switch's missing weights take to load, at the measured rate of transfers.
    """

    kind: SliceKind
    model: str
    started_s: float
    ended_s: float
    tokens: int
    prompt_tokens: int
    switched: bool
    switch_s: float = 0.0
    prompts: int = 0


class KvShapeStats(Struct, frozen=True, kw_only=True):
    """KV of one shape in one memory. `held_bytes`: of its slabs; `moving_bytes`: being transferred; `cached_bytes`: of
    cached prefixes that no request uses, which count as free memory.
    """

    shape: str
    used_bytes: int
    held_bytes: int
    moving_bytes: int
    cached_bytes: int = 0


class PoolStats(Struct, frozen=True, kw_only=True):
    """A slot whose models share its memory. `load` is alpha, the reciprocal of the estimated attainment (Aegaeon eq.
    3): above 1 the slot cannot keep up. `time_slices` are the last ones, oldest first, and `prefill_pace` is measured
    from them; all times are on the engine's clock, now `now_s`. `weights_bytes_per_s`: the measured rate of weight
    transfers, from which switch costs are estimated; `unpinned`: how much host memory CUDA refused to pin, and why.
    `offloaded_layers`: weight layers evicted for KV, by model. Since the start: `pressure_actions`: how KV pressure was
    handled; `offloads_declined`: why no layers were offloaded then; `layers_moved`: offloaded and reclaimed;
    `kv_imports`: requests whose KV another slot computed, by what its copy waited for, the other slot's `device`, the
    `host`, or `nothing`.
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
    offloaded_layers: dict[str, int] = field(default_factory=dict)
    pressure_actions: dict[str, int] = field(default_factory=dict)
    offloads_declined: dict[str, int] = field(default_factory=dict)
    layers_moved: dict[str, int] = field(default_factory=dict)
    kv_imports: dict[str, int] = field(default_factory=dict)
    time_slices: tuple[TimeSlice, ...] = ()
    prefill_pace: PrefillPace = PrefillPace()


class EngineStats(Struct, frozen=True, kw_only=True):
    """Load of a slot. `failed`: instances that can answer nothing any more, with the reason; their owner unloads them.
    `resident_models`: those whose weights are whole on it. Totals are since the start; so are
    `prefix_query_tokens`, the tokens of prefilled requests by model, `prefix_hit_tokens`, those of them whose KV was
    cached, and those in `extra`: `preemptions`, `recomputed` (dropped KV), `swapped_out`, `swapped_in` (transfers of
    one request's KV).
    """

    instances: tuple[InstanceStats, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    resident_models: tuple[str, ...] = ()
    switches_total: int = 0
    steps_total: int = 0
    tokens_total: int = 0
    prefix_query_tokens: dict[str, int] = field(default_factory=dict)
    prefix_hit_tokens: dict[str, int] = field(default_factory=dict)
    pool: PoolStats | None = None
    extra: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """What a worker drives. Its owner calls one method at a time; only `prepare` and `compile` may run concurrently."""

    def prepare(self, model: ModelSpec) -> None:
        """Do the slow part of a `load`: read the model's weights into host memory. May run on another thread while the
        owner continues to step; idempotent. A prepared model that is never loaded stays in the node's model cache until
        host memory is short; on a slot without one it stays.

        Raises:
            ModelLoadError: the checkpoint cannot be used, or can never fit; nothing is kept of it.
            dataplane.memory.model_cache.HostMemoryError: on another thread than the owner's: host memory is full now;
                a later try may succeed.
        """

    def is_prepared(self, model: ModelSpec) -> bool:
        """Whether `load` of a model that was prepared is quick: since then its last instance may have been unloaded."""

    def forget(self, model: ModelSpec) -> None:
        """Keep nothing of an adapter that was prepared and is not loaded: its memory is no cache, and its files may be
        replaced. All else is ignored.
        """

    def load(self, instance_id: str, model: ModelSpec, *, gpus: int = 1) -> None:
        """Load an instance. Quick after `prepare`; without it, that is done first, and if host memory is full now, the
        weights are read before the model's first turn. All instances of a slot share its KV memory, and those of one
        model its weights.

        Raises:
            ModelLoadError: the id is in use, or the checkpoint cannot be used or can never fit; nothing is kept of it,
                but for the base of an adapter, as of one that was only prepared.
        """

    def unload(self, instance_id: str) -> None:
        """Unload an instance, and with the last one of its model its weights. Its requests end with an `error` output
        at the next step; exported KV stays until `release`. Unknown ids are ignored.
        """

    def compile(self, request: EngineRequest) -> None:
        """Do the slow part of an `add`: compile its constraint, if it has one. May run on another thread while the
        owner continues to step; idempotent. Without it, `add` does that, too.

        Raises:
            BadRequestError: the constraint cannot be compiled.
        """

    def add(self, request: EngineRequest) -> None:
        """Queue a request; if its `kv` can be read, it continues from there without a prefill.

        Raises:
            UnknownInstanceError: the instance is not loaded.
            ContextLengthError: prompt + max_tokens exceed the context, or what one request alone on the slot could fill
                (`InstanceStats.kv_tokens_max`).
            BadRequestError: an id in use, an empty prompt, max_tokens below 1, or a token outside of the vocabulary.
        """

    def cancel(self, request_id: str) -> None:
        """Drop a request, exported or not, and free its memory now, or when no transfer uses it any more. It has no
        further outputs. Unknown ids are ignored: it may just have ended.
        """

    def release(self, request_id: str) -> None:
        """Free the KV of a request that was exported, as `cancel` does. Unknown ids are ignored."""

    def step(self) -> list[EngineOutput]:
        """Run one step and return its outputs: often none, while prompts are long or weights or KV are transferred. It
        never blocks for longer than one forward pass or one transfer. Harmless without work.
        """

    def has_work(self) -> bool:
        """Whether a request is running or waiting, or a last output is still to be returned by `step`."""

    def stats(self) -> EngineStats:
        """The present load."""
