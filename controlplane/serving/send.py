"""One request to the fleet: choose an instance, stream its events, and try another while no token has come."""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from controlplane.agents import AgentClient
from controlplane.errors import CapacityError, NodeError, NoSpareCapacityError
from controlplane.policies.decisions import NoRoute, Route
from controlplane.policies.facts import RoutingFacts, Tier
from controlplane.policies.routing import RoutingSettings, choose_route
from controlplane.serving.fleet import FleetCache
from controlplane.settings import Settings
from controlplane.store.tables import Model
from dataplane.messages import ChatMessage, Generate, Sampling, Started, StreamEvent

_BYTES_PER_TOKEN = 4
_OUTPUT_TOKENS_GUESS = 256


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A request on its way to some instance. Exactly one of the prompt's three forms is set.

    `only_region`: the endpoint a deferred request was released to; others are not tried.
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

    def input_tokens_guess(self) -> int:
        """Prompt tokens before anyone has tokenized the prompt: its bytes over four."""
        if self.prompt_tokens is not None:
            return len(self.prompt_tokens)
        texts = [self.prompt] if self.prompt is not None else [m.content for m in self.messages or ()]
        return sum(len(text.encode()) // _BYTES_PER_TOKEN + 1 for text in texts if text is not None)

    def tokens_guess(self) -> int:
        """Prompt and completion tokens together, for the queue it will join."""
        return self.input_tokens_guess() + (self.sampling.max_tokens or _OUTPUT_TOKENS_GUESS)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """First item of a stream: where the request went, and how many prompt tokens it has."""

    route: Route
    prompt_tokens: int


class Sender:
    """Sends requests; one for a process."""

    def __init__(self, fleet: FleetCache, agents: AgentClient, settings: Settings) -> None:
        self._fleet = fleet
        self._agents = agents
        self._attempts_max = settings.request_attempts_max
        self._spare_below = settings.release_below_one
        self._routing = RoutingSettings(
            utilization_max=settings.route_utilization_max, stale_s=settings.heartbeat_stale_s
        )

    async def send(self, outgoing: Outgoing) -> AsyncGenerator[Placed | StreamEvent, None]:
        """`Placed`, then the events of the stream.

        Raises:
            CapacityError: no instance can take it now.
            NodeError: the request is at fault, or every instance tried failed.
        """
        excluded: set[str] = set()
        failure: NodeError | None = None
        while len(excluded) < self._attempts_max:
            try:
                route = self._route(outgoing, frozenset(excluded))
            except CapacityError as error:
                raise failure or error from error
            try:
                async with contextlib.aclosing(self._attempt(outgoing, route)) as attempt:
                    async for item in attempt:
                        yield item
            except _NotStartedError as error:
                excluded.add(route.instance_id)
                failure = error.error
            else:
                return
        assert failure is not None, "at least one attempt was made"
        raise failure

    def _route(self, outgoing: Outgoing, excluded: frozenset[str]) -> Route:
        instances = self._fleet.instances()
        if outgoing.only_region is not None:
            instances = tuple(i for i in instances if i.endpoint.region == outgoing.only_region)
        facts = RoutingFacts(
            model=outgoing.model.name,
            tier=outgoing.tier,
            tokens=outgoing.tokens_guess(),
            preference=self._fleet.preference(outgoing.origin),
            instances=instances,
            excluded=excluded,
        )
        route = choose_route(facts, time.time(), self._routing)
        if isinstance(route, NoRoute):
            raise CapacityError(route.reason)
        spare = route.utilization < self._spare_below
        if outgoing.tier == Tier.NIW and outgoing.only_region is None and not spare:
            raise NoSpareCapacityError("no spare capacity for flex requests now; retry later or use the Batch API")
        return route

    async def _attempt(self, outgoing: Outgoing, route: Route) -> AsyncGenerator[Placed | StreamEvent, None]:
        url = self._fleet.node_url(route.node_id)
        if url is None:
            raise _NotStartedError(NodeError(f"node '{route.node_id}' has no address"))
        self._fleet.note_sent(route.instance_id, outgoing.tokens_guess())
        events = self._agents.generate(url, _message(outgoing, route))
        started = False
        try:
            async for event in events:
                if isinstance(event, Started):
                    yield Placed(route=route, prompt_tokens=event.prompt_tokens)
                else:
                    started = True
                    yield event
        except NodeError as error:
            if error.retryable and not started:
                raise _NotStartedError(error) from error
            raise
        finally:
            await events.aclose()


class _NotStartedError(Exception):
    """An attempt that failed before its first token."""

    def __init__(self, error: NodeError) -> None:
        super().__init__(error.message)
        self.error = error


def _message(outgoing: Outgoing, route: Route) -> Generate:
    return Generate(
        request_id=f"{outgoing.request_id}.{secrets.token_hex(8)}",  # clients may repeat theirs; a node takes each once
        instance_id=route.instance_id,
        model=outgoing.model.name,
        tier=outgoing.tier.value,
        messages=outgoing.messages,
        prompt=outgoing.prompt,
        prompt_tokens=outgoing.prompt_tokens,
        sampling=outgoing.sampling,
    )
