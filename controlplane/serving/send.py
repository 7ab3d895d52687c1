"""One request to the fleet: choose an instance, stream its events, and go on elsewhere when the instance is lost.

Before the first token another instance is tried. After it another one continues from prompt + tokens so far: a token
depends on the seed and its position alone, so the client sees one answer, each token of it once.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec

from controlplane.errors import CapacityError, NodeError
from controlplane.policies.decisions import NoRoute, Route
from controlplane.policies.facts import RoutingFacts
from controlplane.policies.health import CircuitSettings
from controlplane.policies.routing import RoutingSettings, choose_route
from controlplane.serving.agent_client import AgentClient
from controlplane.serving.circuits import Circuits
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.tracing import attempting, step
from controlplane.settings import Settings
from controlplane.store.tables import Model
from dataplane.protocol.messages import STALE_EPOCH, ChatMessage, Generate, Sampling, Started, StreamEvent, Token
from dataplane.protocol.tiers import Tier

_BYTES_PER_TOKEN = 4
_OUTPUT_TOKENS_GUESS = 256
_LOOK_AGAIN_S = 0.25
_SEED_BITS = 31


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A request on its way to some instance. Exactly one of the prompt's three forms is set.

    `only_region`: the endpoint a deferred request was released to; others are not tried. `fence` and `epoch`: of a
    claim of the NIW queue; a node refuses what an older claim asks.
    """

    request_id: str
    model: Model
    tier: Tier
    origin: str | None
    sampling: Sampling
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    only_region: str | None = None
    fence: str | None = None
    epoch: int = 0

    def input_tokens_guess(self) -> int:
        """Prompt tokens before anyone has tokenized the prompt: its bytes over four, at most the model's context. What
        is longer is refused, and must count neither as demand nor as load.
        """
        if self.prompt_tokens is not None:
            guess = len(self.prompt_tokens)
        else:
            texts = [self.prompt] if self.prompt is not None else [m.content for m in self.messages or ()]
            guess = sum(len(text.encode()) // _BYTES_PER_TOKEN + 1 for text in texts if text is not None)
        return min(guess, self.model.context_tokens)

    def tokens_guess(self) -> int:
        """Prompt and completion tokens together, for the queue it will join."""
        return self.input_tokens_guess() + (self.sampling.max_tokens or _OUTPUT_TOKENS_GUESS)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where the request went, and how many prompt tokens it has. First item of a stream, and once more whenever another
    instance takes over.
    """

    route: Route
    prompt_tokens: int


Sent = AsyncGenerator[list[Placed | StreamEvent], None]
"""A stream: what came together, together."""


@dataclass(kw_only=True)
class _Progress:
    """What has come of a request. `excluded`: instances that failed it; `failure`: how the last one did."""

    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    sent_chars: int = 0
    excluded: set[str] = field(default_factory=set)
    failure: NodeError | None = None
    continuations: int = 0
    patient_until_s: float = 0.0

    @property
    def position(self) -> tuple[int, int]:
        """How many tokens, and how many characters of text, the client has."""
        return len(self.token_ids), self.sent_chars

    @property
    def begun(self) -> bool:
        """Whether the client has seen something of the answer."""
        return self.position != (0, 0)

    def note(self, events: list[StreamEvent], route: Route) -> list[Placed | StreamEvent]:
        """The events as they are passed on."""
        for event in events:
            if isinstance(event, Token):
                self.token_ids += event.token_ids
                self.sent_chars += len(event.text)
        first = events[0]
        if not isinstance(first, Started):
            return [*events]
        self.continuations += self.begun
        return [Placed(route=route, prompt_tokens=first.prompt_tokens), *events[1:]]


class Sender:
    """Sends requests; one for a process."""

    def __init__(self, fleet: FleetCache, agents: AgentClient, settings: Settings) -> None:
        self._fleet = fleet
        self._agents = agents
        self._settings = settings
        self._routing = RoutingSettings(
            utilization_max=settings.route_utilization_max, stale_s=settings.heartbeat_stale_s
        )
        self._circuits = Circuits(CircuitSettings(open_max_s=settings.circuit_open_max_s))

    async def send(self, outgoing: Outgoing, tried: list[Route] | None = None) -> Sent:
        """`Placed`, then the events of the stream. Every route that is tried is added to `tried`.

        Raises:
            CapacityError: no instance can take it now.
            NodeError: the request is at fault, or every instance tried failed.
        """
        patient_until_s = time.monotonic() + self._settings.request_start_wait_s
        progress = _Progress(sampling=_seeded(outgoing.sampling), patient_until_s=patient_until_s)
        while True:
            with step("route"):
                route = await self._next_route(outgoing, progress)
            sending = self._fleet.note_sent(route.instance_id, outgoing.tokens_guess(), outgoing.input_tokens_guess())
            self._circuits.note_sent(route)
            if tried is not None:
                tried.append(route)
            before = progress.position
            try:
                with attempting(outgoing.request_id, route) as headers:
                    message = self._message(outgoing, progress, route)
                    generating = self._agents.generate(self._url(route), message, headers)
                    async with contextlib.aclosing(generating) as batches:
                        async for events in batches:
                            yield progress.note(events, route)
            except NodeError as error:
                self._fleet.note_refused(route.instance_id, sending)
                self._circuits.note_end(route, error)
                self._require_another(progress, error)
                progress.excluded.add(route.instance_id)
                progress.failure = error
                if progress.position != before:
                    progress.patient_until_s = time.monotonic() + self._settings.stream_continue_wait_s
            else:
                self._circuits.note_end(route, None)
                return

    def _require_another(self, progress: _Progress, error: NodeError) -> None:
        """Raise `error` if no other instance shall be tried. What has begun was no fault of the request's; a claim that
        is no longer the newest has no business on any node.
        """
        if error.code == STALE_EPOCH:
            over = True
        elif progress.begun:
            over = progress.continuations >= self._settings.stream_continuations_max
        else:
            over = not error.retryable or (
                len(progress.excluded) + 1 >= self._settings.request_attempts_max
                and not (error.untouched and time.monotonic() < progress.patient_until_s)
            )
        if over:
            raise error

    async def _next_route(self, outgoing: Outgoing, progress: _Progress) -> Route:
        """Where to try next. A stream that has begun waits for an instance, be it one that failed and came back; one
        that has not waits for an instance that is starting.
        """
        while True:
            try:
                return self._route(outgoing, progress)
            except CapacityError as error:
                may_wait = progress.begun or self._is_worth_waiting(outgoing, progress)
                if not may_wait or time.monotonic() >= progress.patient_until_s:
                    raise progress.failure or error from error
            await asyncio.sleep(_LOOK_AGAIN_S)
            progress.excluded.clear()

    def _is_worth_waiting(self, outgoing: Outgoing, progress: _Progress) -> bool:
        """Whether an instance of the model is on its way, for a request that nobody has worked on. Deferred requests go
        back to their queue instead.
        """
        untouched = progress.failure is None or progress.failure.untouched
        within_s = self._settings.request_start_wait_s
        return outgoing.tier != Tier.NIW and untouched and self._fleet.is_starting(outgoing.model.name, within_s)

    def _route(self, outgoing: Outgoing, progress: _Progress) -> Route:
        facts = self.routing_facts(outgoing, excluded=frozenset(progress.excluded))
        route = choose_route(facts, time.time(), self._routing)
        if isinstance(route, NoRoute):
            raise CapacityError(route.reason)
        return route

    def routing_facts(self, outgoing: Outgoing, *, excluded: frozenset[str] = frozenset()) -> RoutingFacts:
        """What is known now for placing a request."""
        instances = self._fleet.instances(outgoing.model.name)
        if outgoing.only_region is not None:
            instances = tuple(i for i in instances if i.endpoint.region == outgoing.only_region)
        objective = self._fleet.objective(outgoing.model, outgoing.tier)
        return RoutingFacts(
            model=outgoing.model.name,
            tier=outgoing.tier,
            tokens=outgoing.tokens_guess(),
            preference=self._fleet.preference(outgoing.origin),
            instances=instances,
            excluded=excluded,
            avoided=self._circuits.avoided(),
            ttft_s=None if objective is None else objective.ttft_s,
        )

    def _message(self, outgoing: Outgoing, progress: _Progress, route: Route) -> Generate:
        objective = self._fleet.objective(outgoing.model, outgoing.tier)
        return Generate(
            # Clients may repeat their ids; a node takes each once.
            request_id=f"{outgoing.request_id}.{secrets.token_hex(8)}",
            instance_id=route.instance_id,
            model=outgoing.model.name,
            tier=outgoing.tier,
            objective=objective,
            messages=outgoing.messages,
            prompt=outgoing.prompt,
            prompt_tokens=outgoing.prompt_tokens,
            sampling=progress.sampling,
            generated=tuple(progress.token_ids),
            sent_chars=progress.sent_chars,
            fence=outgoing.fence,
            epoch=outgoing.epoch,
        )

    def _url(self, route: Route) -> str:
        url = self._fleet.node_url(route.node_id)
        if url is None:
            raise NodeError(f"node '{route.node_id}' has no address")
        return url


def _seeded(sampling: Sampling) -> Sampling:
    """With a seed, so that whoever continues the answer makes the tokens that the first instance would have made."""
    if sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=secrets.randbits(_SEED_BITS))
