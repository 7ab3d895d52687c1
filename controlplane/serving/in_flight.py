"""A request in flight: what a node is asked for, where it may run, and how far its answer got."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from controlplane.errors import ContextLengthError, NodeError, WrongTaskError
from controlplane.policies.decisions import Route
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.node_streams import PassOn
from controlplane.serving.prompt_prefixes import PromptPrefix, prefix_of
from controlplane.store.tables import Model
from dataplane.protocol.messages import Finished, Generate, Started, Task, Token
from dataplane.protocol.records import RecordedEvent, TextRecord

BYTES_PER_TOKEN = 4
OUTPUT_TOKENS_GUESS = 256
"""Estimates, as long as no node has tokenized a prompt, and where a request does not limit its answer. Limits of
tenants count the latter, so that what they charge does not hang on others' answers; queues count `ExpectedLengths`.
"""
_TEMPLATE_TOKENS, _MESSAGE_TOKENS = 256, 16
"""What a chat template may add to a prompt, and to each of its messages and of their calls."""

EventStream = AsyncGenerator[list[RecordedEvent], None]
"""The events of a request; those that arrived together are one list."""


@dataclass(kw_only=True)
class InFlightRequest:
    """One request of a gateway or a dispatcher, from its admission to the end of its stream.

    `message`: the request as nodes take it; every attempt adds its instance and the tokens so far. `input_tokens`: an
    estimate. `context_tokens`: those of its model. `preference`: the regions in the order in which `origin` prefers
    them. `only_region`: the region that a deferred request was released to. `routes`: every instance that was tried, in
    order; the last one streams. `excluded`: instances that failed the request, and `failure`: how the last one did.
    `wait_until_s`: until when the request waits for an instance, by `time.monotonic`. `beside`: the instance that has
    computed its prompt just now for another choice of the same query. `released_to`: the instance that has room for it;
    it is taken if no other is known to have cached the prompt. `rerouted_to`: the idle instance that it moved to, once,
    from the queue of another one. `cached_tokens`: of its prompt, which each instance had likely cached when it was
    routed last. `prefix`: its prompt, as instances may have cached it.
    `text_frame`: as in `Generate`. `pass_on`: takes its text past the stream, as soon as whoever reads the stream has
    set it.
    """

    message: Generate
    input_tokens: int
    context_tokens: int
    origin: str | None
    preference: tuple[str, ...]
    prefix: PromptPrefix
    only_region: str | None = None
    beside: str | None = None
    released_to: str | None = None
    rerouted_to: str | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    text_frame: tuple[str, str] | None = None
    pass_on: PassOn | None = None
    routes: list[Route] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)
    failure: NodeError | None = None
    wait_until_s: float = 0.0
    continuations: int = 0
    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    sent_chars: int = 0
    end: Finished | None = None

    @classmethod
    def of(
        cls,
        fleet: FleetCache,
        model: Model,
        message: Generate,
        *,
        tenant: str,
        origin: str | None,
        only_region: str | None = None,
        prompt_cache_key: str = "",
        prefix: PromptPrefix | None = None,
    ) -> "InFlightRequest":
        """A request that begins now. Its `cache_salt` becomes one of its tenant's own, unless tenants share prefixes.
        `prefix`: of its prompt, if known.

        Raises:
            ContextLengthError: `max_tokens` alone is beyond the model's context.
        """
        check_context(message.sampling.max_tokens, model)
        salted = msgspec.structs.replace(
            message,
            objective=fleet.objective(model, message.tier),
            cache_salt=fleet.cache_salt(tenant, message.cache_salt),
        )
        return cls(
            message=salted,
            prefix=prefix or prefix_of(salted, prompt_cache_key),
            input_tokens=min(estimated_input_tokens(message), model.context_tokens),
            context_tokens=model.context_tokens,
            origin=origin,
            preference=fleet.preference(origin),
            only_region=only_region,
        )

    @property
    def tokens(self) -> int:
        """An estimate of prompt and completion tokens together, as limits count them."""
        if self.message.pooling:
            return self.input_tokens
        return self.input_tokens + (self.message.sampling.max_tokens or OUTPUT_TOKENS_GUESS)

    @property
    def output_tokens_max(self) -> int:
        """Tokens of its answer, as it asks for; 0: what there is room for. An answer that has begun is to go on."""
        return self.message.sampling.max_tokens or (len(self.token_ids) + 1 if self.begun else 0)

    @property
    def tokens_max(self) -> int:
        """The most prompt and completion tokens that it may take: a token of text has a byte at least."""
        prompt = self.input_tokens
        if self.message.prompt_tokens is None:
            parts = sum(1 + len(each.tool_calls) for each in self.message.messages or ())
            prompt = BYTES_PER_TOKEN * prompt + _TEMPLATE_TOKENS + _MESSAGE_TOKENS * parts
        answer = 0 if self.message.pooling else self.message.sampling.max_tokens or self.context_tokens
        return min(self.context_tokens, prompt + answer)

    @property
    def used_tokens(self) -> int:
        """Prompt and completion tokens so far; 0 until a node has the request."""
        if self.end is not None:
            return self.end.prompt_tokens + self.end.completion_tokens
        return self.prompt_tokens + len(self.token_ids)

    @property
    def position(self) -> tuple[int, int]:
        """How many tokens, and how many characters of text, the client has."""
        return len(self.token_ids), self.sent_chars

    @property
    def begun(self) -> bool:
        """Whether the client has received a part of the answer."""
        return self.position != (0, 0)

    def note(self, events: Sequence[RecordedEvent]) -> None:
        """Record the events that a node has just sent."""
        for event in events:
            if isinstance(event, TextRecord):
                self.note_text(event)
            elif isinstance(event, Token):
                self.token_ids += event.token_ids
                self.sent_chars += len(event.text)
            elif isinstance(event, Started):
                self.prompt_tokens = event.prompt_tokens
                self.continuations += self.begun
            elif isinstance(event, Finished):
                self.end = event

    def note_text(self, text: TextRecord) -> None:
        """Record text that the client has got."""
        self.token_ids += text.token_ids
        self.sent_chars += text.chars


def estimated_input_tokens(message: Generate) -> int:
    """Prompt tokens before a node has tokenized the prompt: the token ids' number, or the bytes over four of all that a
    chat template may write, of tools and of its variables as JSON.
    """
    if message.prompt_tokens is not None:
        return len(message.prompt_tokens)
    texts = [(message.prompt or "",)] if message.messages is None else [each.texts for each in message.messages]
    tokens = sum(sum(len(text.encode()) for text in each) // BYTES_PER_TOKEN + 1 for each in texts)
    if message.tools is not None or message.template:
        tokens += len(msgspec.json.encode((message.tools, message.template))) // BYTES_PER_TOKEN
    return tokens


def check_task(task: Task, model: Model) -> None:
    """Accept a request for what the model answers with.

    Raises:
        WrongTaskError: it answers with something else.
    """
    if model.task not in (None, task):
        gives = {"generate": "text", "embed": "embeddings", "score": "scores"}
        raise WrongTaskError(
            f"the model '{model.name}' answers with {gives[model.task]}, not with {gives[task]}", param="model"
        )


def check_context(max_tokens: int | None, model: Model) -> None:
    """Accept a request that may fit the model.

    Raises:
        ContextLengthError: `max_tokens` alone is beyond the model's context.
    """
    if max_tokens is not None and max_tokens >= model.context_tokens:
        raise ContextLengthError(
            f"max_tokens {max_tokens} leaves no room for a prompt: the context of '{model.name}' is"
            f" {model.context_tokens} tokens",
            param="max_tokens",
        )
