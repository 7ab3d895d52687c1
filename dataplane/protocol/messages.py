"""The messages between the control plane and a node. JSON both ways; a stream is one JSON object per line.

Everything here is a frozen `msgspec.Struct`: decoding validates, and an error names the field.
Units are in the names: `_s` seconds, `_bytes` bytes, `_tokens` tokens.
"""

from typing import Literal

import msgspec

from dataplane.protocol.tiers import InstanceKind, Objective, Tier

FinishReason = Literal["stop", "length"]
InstanceState = Literal["loading", "ready", "draining", "spot", "failed"]
EngineKind = Literal["torch", "vllm", "replay"]
EngineChoice = Literal["auto", "torch", "vllm"]
"""Which engine a model's dedicated instances run on; auto: the node decides. Pooled ones always run on torch."""
STALE_EPOCH = "stale_epoch"
"""Code of the refusal of a claim that is not the newest of its fence."""
INSTANCE_NOT_READY = "instance_not_ready"
"""Code of the refusal of a request whose instance is not on the node, or not ready there."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation, its content already flattened to text."""

    role: str
    content: str


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. `temperature` 0 is greedy; `seed` makes sampling repeatable, on any instance."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Generate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for tokens, addressed to one instance. Exactly one of `messages`, `prompt`, `prompt_tokens` is set.

    `objective`: that of its tier and model; None, as for deferred requests and from older control planes: the node's
    default for the tier. `lease_id`: the lease of a spot instance, which takes no other requests. `generated`: tokens
    of this answer that another instance made; the stream continues after them. `sent_chars`: characters of their text
    that were streamed already. `Finished` counts the whole answer. `fence`: names a deferred request across its claims,
    of which `epoch` is the number; a node refuses older epochs of a fence than it has seen.
    """

    request_id: str
    instance_id: str
    model: str
    tier: Tier
    objective: Objective | None = None
    lease_id: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    sampling: Sampling = Sampling()
    generated: tuple[int, ...] = ()
    sent_chars: int = 0
    fence: str | None = None
    epoch: int = 0


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """First line of a stream: the request was tokenized and admitted."""

    prompt_tokens: int


class Token(msgspec.Struct, frozen=True, kw_only=True, tag="token"):
    """New text. `text` may be empty while bytes of a character are still missing or a stop string may be forming."""

    text: str
    token_ids: tuple[int, ...] = ()


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Last line of a stream that ended well."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Last line of a stream that broke; also the body of a refusal. `retryable`: another instance may do better."""

    status: int
    code: str
    message: str
    param: str | None = None
    retryable: bool = False


StreamEvent = Started | Token | Finished | Failed


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a node must know to run a model. `path` is a Hugging Face checkpoint folder readable on the node."""

    name: str
    path: str
    weights_bytes: int
    kv_bytes_per_token: int
    context_tokens: int
    engine: EngineChoice = "auto"

    def is_same(self, other: "ModelSpec") -> bool:
        """Whether it is the same model, on whatever engine: requests may continue from their tokens."""
        return msgspec.structs.replace(self, engine=other.engine) == other


class DesiredInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that a node shall host. `draining`: finish what runs, accept nothing new, then unload.

    `gpus` 0: a pooled instance, which shares all GPUs of its slot in time slices. `spot`: finish what runs, accept only
    requests with the `lease_id`, and stay loaded. It is set as soon as the instance is to be donated, while requests
    from before still run.
    """

    instance_id: str
    slot: int
    gpus: int
    model: ModelSpec
    draining: bool = False
    spot: bool = False
    lease_id: str | None = None
    kind: InstanceKind = InstanceKind.MIXED


class DesiredInstances(msgspec.Struct, frozen=True, kw_only=True):
    """The whole desired state of a node. A node that follows a newer `generation` refuses an older one.

    `handing_over`: the node is shutting down, and its instances drain or have successors that start elsewhere.
    """

    generation: int
    instances: tuple[DesiredInstance, ...]
    handing_over: bool = False


class SlotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker group of a node. `memory_bytes`: of all its `gpus` together. `workers` share the GPUs equally; an
    instance is on every worker, so a model must fit on the GPUs of one. `weights_bytes`: the memory of each worker
    for weights; None from agents of older versions.
    """

    gpus: int
    memory_bytes: int
    workers: int = 1
    weights_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            ValueError: the workers have no equal numbers of GPUs, or no memory for weights.
        """
        if self.gpus < 1 or self.workers < 1 or self.gpus % self.workers:
            raise ValueError(f"workers must be at least 1 and divide gpus, {self.gpus}, not {self.workers}")
        if self.weights_bytes is not None and self.weights_bytes < 1:
            raise ValueError(f"weights_bytes must be at least 1, not {self.weights_bytes}")

    @property
    def worker_gpus(self) -> int:
        """GPUs of one worker: the most that a model may take."""
        return self.gpus // self.workers


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A node joins. Joining again with the same name replaces its url and slots.

    `host_bytes`: host memory for the models of all its slots; None from agents of older versions. `dtype`: the type of
    weights; None: as stored (a replay), or an agent of an older version.
    """

    node: str
    region: str
    gpu_type: str
    url: str
    slots: tuple[SlotSpec, ...]
    engine: EngineKind
    host_bytes: int | None = None
    dtype: str | None = None


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state and load of one instance. `remaining_tokens`: prompt tokens not yet prefilled + tokens to generate.

    `prefill_wait_s`: until its slot would begin an IW-N request, `prefill_urgent_wait_s`: an IW-F request, which may
    overtake; `prefill_token_s`: its pace. `waits_for`: what a loading instance waits for.
    A spot instance is `draining` while requests from before its donation run, then `spot`. KV capacity is the KV in use
    by the instance and its share of what is free, equal to that of other ready instances of its model; for a pooled
    instance, both are those of the whole slot. `context_tokens`: the limit for prompt and answer together; None: it is
    not loaded, or its node has an older version.
    """

    instance_id: str
    model: str
    slot: int
    state: InstanceState
    kv_used_bytes: int = 0
    kv_capacity_bytes: int = 0
    remaining_tokens: int = 0
    running: int = 0
    waiting: int = 0
    error: str | None = None
    kind: InstanceKind = InstanceKind.MIXED
    waits_for: str | None = None
    prefill_wait_s: float | None = None
    prefill_urgent_wait_s: float | None = None
    prefill_token_s: float | None = None
    context_tokens: int | None = None


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Sent each second. `boot_id` changes when the agent restarts; `generation` is of the desired state it follows.

    `load` is that of the busiest worker: above 1 it cannot keep up with its decodes (Aegaeon eq. 3, alpha).
    `leaving`: the agent is shutting down and asks for successors of its instances on other nodes.
    """

    node: str
    boot_id: str
    generation: int
    instances: tuple[InstanceReport, ...]
    switches_total: int = 0
    load: float = 0.0
    leaving: bool = False


def encode_line(event: StreamEvent) -> bytes:
    """One stream line, newline included."""
    return msgspec.json.encode(event) + b"\n"


_event_decoder: msgspec.json.Decoder[StreamEvent] = msgspec.json.Decoder(StreamEvent)


def decode_lines(lines: bytes) -> list[StreamEvent]:
    """The events of whole stream lines.

    Raises:
        msgspec.ValidationError: a line is no event of this protocol.
    """
    return _event_decoder.decode_lines(lines)
