"""The messages between the control plane and a node. JSON both ways; a stream is one JSON object per line.

Everything here is a frozen `msgspec.Struct`: decoding validates, and an error names the field.
Units are in the names: `_s` seconds, `_bytes` bytes, `_tokens` tokens.
"""

from typing import Annotated, Any, Literal

import msgspec

from dataplane.protocol.host_states import HostState
from dataplane.protocol.pool_reports import PoolReport
from dataplane.protocol.tiers import InstanceKind, Objective, Tier

FinishReason = Literal["stop", "length", "tool_calls"]
InstanceState = Literal["loading", "ready", "draining", "spot", "failed"]
EngineKind = Literal["torch", "vllm", "replay"]
Task = Literal["generate", "embed", "score"]
"""What a model answers with: tokens, an embedding, or the scores of a classification head."""
EngineChoice = Literal["auto", "torch", "vllm"]
"""Which engine a model's dedicated instances run on; auto: the node decides. Pooled ones always run on torch."""
STALE_EPOCH = "stale_epoch"
"""Code of the refusal of a claim that is not the newest of its fence."""
ANSWER_FAILED = "answer_failed"
"""Code of the failure of an answer that cannot be made of its tokens: any other node would fail with them, too."""
INSTANCE_NOT_READY = "instance_not_ready"
"""Code of the refusal of a request whose instance is not on the node, or not ready there."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a function, as a conversation repeats it. `arguments`: JSON text."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation, its content already flattened to text. `tool_call_id`: the call that a message of the
    role `tool` answers. `reasoning`: what the assistant thought before its content.
    """

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All of it that a chat template may write into a prompt, besides its role."""
        calls = [text for call in self.tool_calls for text in (call.id, call.name, call.arguments)]
        return self.content, self.reasoning or "", self.name or "", self.tool_call_id or "", *calls


class Tool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that the model may call. `parameters`: the JSON schema of its arguments; None: any object. With
    `strict`, the arguments of every call match it.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tools of a request. `choice` "named": the answer is one call of `name`. `parallel`: it may hold several."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of an answer must match. `definition`: a JSON schema or a list of strings (`choice`), both as JSON
    text; a regular expression; or a Lark grammar. It is empty for `json_object`. `after`: a text before which
    the answer is free, as the end of reasoning, and `opening` the text that begins what is free, where that is neither
    certain nor done by the prompt; nodes set both.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    definition: str = ""
    after: str = ""
    opening: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. `temperature` 0 is greedy; `seed` makes sampling repeatable, on any instance.

    `frequency_penalty` and `presence_penalty` count the tokens of the answer, `repetition_penalty` those of the prompt
    too. `logit_bias`: (token id, bias) pairs. `top_k` 0: no limit. `min_p`: the least probability, relative to that of
    the likeliest token. `min_tokens`: no end of sequence and no stop string within so many tokens. `logprobs`: report
    the log probability of each token under the model's raw distribution, and of so many likeliest ones; None: none.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


class Generate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for tokens, addressed to one instance. Exactly one of `messages`, `prompt`, `prompt_tokens` is set.

    `objective`: that of its tier and model; None, as for deferred requests and from older control planes: the node's
    default for the tier. `lease_id`: the lease of a spot instance, which takes no other requests. `generated`: tokens
    of this answer that another instance made; the stream continues after them. `sent_chars`: characters of their text
    that were streamed already. `Finished` counts the whole answer. `fence`: names a deferred request across its claims,
    of which `epoch` is the number; a node refuses older epochs of a fence than it has seen.

    `template`: further variables of the chat template. `constraint`: of the answer after any reasoning. `cache_salt`:
    only requests with the same salt share cached prefixes. `pooling`: answer with one `Pooled` event instead of tokens,
    for models whose task is not "generate". `dimensions`: to how many numbers an embedding is cut. `prompt_name`: which
    of the checkpoint's own prompts precedes the text to embed; None: its default one, if it has one.

    `text_frame`: what stands before and after the text of new tokens, written as a JSON string, where the sender reads
    records (`dataplane.protocol.records`): tokens that are nothing but text arrive so. None: they arrive as `Token`s.
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
    tools: ToolUse | None = None
    template: dict[str, Any] = {}
    constraint: Constraint | None = None
    cache_salt: str = ""
    pooling: bool = False
    dimensions: int | None = None
    prompt_name: str | None = None
    text_frame: tuple[str, str] | None = None


Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A number of tokens that a node reports. Who adds them up can rely on the bounds."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """First line of a stream: the request was tokenized and admitted."""

    prompt_tokens: Count


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token, its text, the bytes of that text, and its log probability."""

    token_id: int
    text: str
    utf8: tuple[int, ...]
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of a token of the answer, and the likeliest tokens at its position, the likeliest first."""

    token: TopLogprob
    top: tuple[TopLogprob, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """More of a tool call. `index`: its number in the answer. `name` is set once, before any `arguments`, which are
    pieces of JSON text.
    """

    index: int
    name: str | None = None
    arguments: str = ""


class Token(msgspec.Struct, frozen=True, kw_only=True, tag="token", omit_defaults=True):
    """New text. `text` may be empty while bytes of a character are still missing, a stop string or a tool call may be
    forming, or where the text is `reasoning` or arguments of `tool_calls`. `logprobs`: of `token_ids`, if asked for.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class Pooled(msgspec.Struct, frozen=True, kw_only=True, tag="pooled"):
    """The whole answer of a model that does not generate: an embedding `[dimensions]`, or the scores of a head."""

    values: tuple[float, ...]


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", omit_defaults=True):
    """Last line of a stream that ended well. `cached_tokens`: of the prompt, whose KV was cached when this node first
    prefilled the request (also if it only continued it). `reasoning_tokens`: of the completion.
    """

    finish_reason: FinishReason
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0
    reasoning_tokens: Count = 0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Last line of a stream that broke; also the body of a refusal. `retryable`: another instance may do better."""

    status: int
    code: str
    message: str
    param: str | None = None
    retryable: bool = False


StreamEvent = Started | Token | Pooled | Finished | Failed


class Tokenize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A question to an instance: the tokens of a plain prompt or of a conversation, exactly one of which is set.

    `special_tokens`: add those that the checkpoint puts around a plain text. `answer`: the text of a conversation ends
    where the answer begins. `spelled`: tell each token as the vocabulary spells it, too. Others: as in `Generate`.
    """

    instance_id: str
    model: str
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    tools: tuple[Tool, ...] = ()
    template: dict[str, Any] = {}
    special_tokens: bool = True
    answer: bool = True
    spelled: bool = False


class Tokenized(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to `Tokenize`. `context_tokens`: the most tokens of prompt and answer together."""

    tokens: tuple[int, ...]
    context_tokens: int
    spelled: tuple[str, ...] = ()


class Detokenize(msgspec.Struct, frozen=True, kw_only=True):
    """A question to an instance: the text of tokens, special ones included."""

    instance_id: str
    model: str
    tokens: tuple[int, ...]


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Detokenize`."""

    text: str


class BaseModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model whose weights an adapter is added to. `path`: its checkpoint folder; `weights_bytes`: of its own."""

    name: str
    path: str
    weights_bytes: int


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a node must know to run a model. `path` is a Hugging Face checkpoint folder readable on the node.
    `tool_parser`, `reasoning_parser`: how tool calls and reasoning are found in its answers; None: as its chat template
    suggests.

    With a `base` the model is a LoRA adapter: `path` is its folder as PEFT writes it, and `weights_bytes` are its own.
    A node that does not know the field finds no checkpoint in that folder, and so never answers with the base alone.
    `adapters`: folders of the adapters that are to be loaded beside it, so that an engine that reserves memory for them
    reserves enough; agents fill it in.
    """

    name: str
    path: str
    weights_bytes: int
    kv_bytes_per_token: int
    context_tokens: int
    engine: EngineChoice = "auto"
    task: Task = "generate"
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    base: BaseModel | None = None
    adapters: tuple[str, ...] = ()

    @property
    def checkpoint(self) -> "ModelSpec":
        """The model whose checkpoint has the tokenizer and most of the weights: the base of an adapter, or itself."""
        base = self.base
        if base is None:
            return self
        return msgspec.structs.replace(
            self, name=base.name, path=base.path, weights_bytes=base.weights_bytes, base=None
        )

    def is_same(self, other: "ModelSpec") -> bool:
        """Whether it is the same model, on whatever engine and however its answers are parsed: requests may continue
        from their tokens.
        """
        return (
            msgspec.structs.replace(
                self, engine=other.engine, tool_parser=other.tool_parser, reasoning_parser=other.reasoning_parser
            )
            == other
        )


class DesiredInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that a node shall host. `draining`: finish what runs, accept nothing new, then unload.

    `gpus` 0: a pooled instance, which shares all GPUs of its slot in time slices. `spot`: finish what runs, accept only
    requests with the `lease_id`, and stay loaded. It is set as soon as the instance is to be donated, while requests
    from before still run. `host`: the instance of its base that a LoRA adapter is served by; it has the host's GPUs,
    engine and kind, and ends with it.
    """

    instance_id: str
    slot: int
    gpus: int
    model: ModelSpec
    draining: bool = False
    spot: bool = False
    lease_id: str | None = None
    kind: InstanceKind = InstanceKind.MIXED
    host: str | None = None


class DesiredInstances(msgspec.Struct, frozen=True, kw_only=True):
    """The whole desired state of a node. A node that follows a newer `generation` refuses an older one.

    `handing_over`: the node is shutting down, and its instances drain or have successors that start elsewhere. `term`:
    of the primary that says so (0 from a control plane of the version before, which is followed); a node refuses
    older ones than it has seen. `layout`: how its GPUs are to be grouped now, see `layouts`; None: as it joined.
    """

    generation: int
    instances: tuple[DesiredInstance, ...]
    handing_over: bool = False
    term: int = 0
    layout: tuple[int, ...] | None = None


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state and load of one instance. `remaining_tokens`: prompt tokens not yet prefilled + tokens to generate.

    `prefill_wait_s`: until its slot would begin an IW-N request, `prefill_urgent_wait_s`: an IW-F request, which may
    overtake; `prefill_token_s`: its pace. `waits_for`: what a loading instance waits for. A spot instance is `draining`
    while requests from before its donation run, then `spot`. KV capacity is the KV in use by the instance and its share
    of what is free, equal to that of other ready instances of its model; for a pooled instance, both are those of the
    whole slot. `context_tokens`: the limit for prompt and answer together. `batch_max`: sequences that run at once, on
    all its workers. `input_tokens_per_s`: of the prompts received in the last minute. `prefill_s`, `decode_s`: of the
    steps of `reference_steps`, as observed. `pooled`: it shares its slot. `host`: the instance that serves an adapter,
    which then reports the load of both, as that does. None: not known, not loaded, or older node.
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
    batch_max: int | None = None
    input_tokens_per_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    pooled: bool = False
    host: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Sent each second. `boot_id` changes when the agent restarts; `generation` is of the desired state it follows.

    `load` is that of the busiest worker: above 1 it cannot keep up with its decodes (Aegaeon eq. 3, alpha).
    `leaving`: the agent is shutting down and asks for successors of its instances on other nodes. `pools`: its workers
    that several models share; none from agents of older versions. `term`: the newest that the agent has seen. `hosts`:
    the other hosts of its slots.
    """

    node: str
    boot_id: str
    generation: int
    instances: tuple[InstanceReport, ...]
    switches_total: int = 0
    load: float = 0.0
    leaving: bool = False
    pools: tuple[PoolReport, ...] = ()
    term: int = 0
    hosts: tuple[HostState, ...] = ()


def encode_line(event: StreamEvent) -> bytes:
    """One stream line, newline included."""
    return msgspec.json.encode(event) + b"\n"


_event_decoder: msgspec.json.Decoder[StreamEvent] = msgspec.json.Decoder(StreamEvent)


def decode_lines(lines: bytes) -> list[StreamEvent]:
    """The events of whole stream lines.

    Raises:
        msgspec.DecodeError: a line is no event of this protocol.
    """
    try:
        return _event_decoder.decode_lines(lines)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error
