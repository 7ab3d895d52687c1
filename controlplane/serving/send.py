"""One request to the fleet: choose an instance, stream its events, and continue elsewhere when the instance is lost.

Before the first token another instance is tried, also one that is idle while the request waits. After it another one
continues from prompt + tokens so far: a token depends on the seed and its position alone, so the client sees one
answer, each token of it once.
"""

import asyncio
import contextlib
import random
import time

import msgspec
import uuid_utils

from controlplane.errors import CapacityError, NodeError, ReroutedError
from controlplane.policies.decisions import NoRoute, Route
from controlplane.policies.facts import RoutingFacts
from controlplane.policies.health import CircuitSettings
from controlplane.policies.routing import RoutingSettings, choose_route, takers
from controlplane.serving.agent_client import AgentClient
from controlplane.serving.attempts import Attempt
from controlplane.serving.circuits import Circuits
from controlplane.serving.expected_lengths import ExpectedLengths
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.in_flight import EventStream, InFlightRequest
from controlplane.serving.prompt_prefixes import CachedPrefixes
from controlplane.serving.tracing import attempting, step
from controlplane.settings import Settings
from dataplane.protocol.messages import ANSWER_FAILED, STALE_EPOCH, Generate, Sampling
from dataplane.protocol.tiers import Tier

_RETRY_ROUTE_S = 0.25
_SEED_BITS = 31
_FINAL = frozenset({STALE_EPOCH, ANSWER_FAILED})
"""Codes of failures that end a request, also one whose answer has begun."""


class Sender:
    """Sends requests; one for a process."""

    def __init__(self, fleet: FleetCache, agents: AgentClient, settings: Settings) -> None:
        self._fleet = fleet
        self._agents = agents
        self._settings = settings
        self._routing = RoutingSettings(
            utilization_max=settings.route_utilization_max,
            stale_s=settings.heartbeat_stale_s,
            timely_share=settings.route_timely_share,
        )
        self._circuits = Circuits(CircuitSettings(open_max_s=settings.circuit_open_max_s))
        self._prefixes = CachedPrefixes(settings.prefix_index_keys_max)
        self._lengths = ExpectedLengths()
        self.waiting: dict[Attempt, None] = {}
        """Requests that may move to another instance, since they have no part of their answer yet."""

    async def send(self, request: InFlightRequest, facts: RoutingFacts | None = None) -> EventStream:
        """The events of the stream: `Started` from each instance that takes the request, then what it answers.
        `facts`: those by which the request has just been admitted; the first instance is chosen by them.

        Raises:
            CapacityError: no instance can take it now.
            NodeError: the request is at fault, or every instance tried failed.
        """
        request.message = msgspec.structs.replace(request.message, sampling=_seeded(request.message.sampling))
        request.wait_until_s = time.monotonic() + self._settings.request_start_wait_s
        while True:
            with step("route"):
                route = await self._next_route(request, facts)
            facts = None
            cached = route.cached_tokens
            tokens = request.input_tokens - cached
            sending = self._fleet.note_sent(route.instance_id, tokens + self._lengths.to_come(request), tokens)
            prompt = self._prefixes.begin(request.prefix, route)
            self._circuits.note_sent(route)
            request.routes.append(route)
            attempt = Attempt(request, prompt, route, self.waiting)
            try:
                with attempting(request.message.request_id, route) as headers:
                    message = _message(request, route)
                    generating = self._agents.generate(
                        self._url(route), message, headers, attempt.pass_on, attempt.opened
                    )
                    async with contextlib.aclosing(generating) as stream:
                        async for events in stream:
                            attempt.note(events)
                            yield events
            except ReroutedError as moved:
                prompt.note_withdrawn()
                self._fleet.note_refused(route.instance_id, sending)
                self._note_moved(request, moved)
            except NodeError as error:
                prompt.note_failed()
                self._fleet.note_refused(route.instance_id, sending)
                self._circuits.note_end(route, error)
                self._require_another(request, error)
                request.excluded.add(route.instance_id)
                request.failure = error
                if attempt.has_begun:
                    request.wait_until_s = time.monotonic() + self._settings.stream_continue_wait_s
            else:
                self._circuits.note_end(route, None)
                if request.message.tier == Tier.NIW:  # what waits for capacity need not wait for the next report
                    self._fleet.note_ended(route.instance_id, sending)
                if request.end is not None:
                    prompt.note_end(request.end)
                    self._lengths.note(request.message.model, request.end)
                return
            finally:
                attempt.end()

    def _note_moved(self, request: InFlightRequest, moved: ReroutedError) -> None:
        request.rerouted_to = moved.instance_id
        request.wait_until_s = time.monotonic() + self._settings.request_start_wait_s

    def _require_another(self, request: InFlightRequest, error: NodeError) -> None:
        """Raise `error` if no other instance shall be tried. A stream that has begun was not the request's fault, nor
        is what moved a request that another instance had accepted; a claim that is no longer the newest may run on no
        node, and an answer that cannot be made of its tokens can be made on none. An error is no longer `untouched`
        once an earlier instance has worked on the request.
        """
        may_try_again = error.untouched and time.monotonic() < request.wait_until_s
        error.untouched &= request.failure is None or request.failure.untouched
        *before, last = (one.instance_id for one in request.routes)
        if error.code in _FINAL:
            over = True
        elif last == request.rerouted_to and last not in before and not request.begun:
            over = False
        elif request.begun:
            over = request.continuations >= self._settings.stream_continuations_max
        else:
            over = not error.retryable or (
                len(request.excluded) + 1 >= self._settings.request_attempts_max and not may_try_again
            )
        if over:
            raise error

    async def _next_route(self, request: InFlightRequest, facts: RoutingFacts | None) -> Route:
        """The instance to try next. A stream that has begun waits for any instance, also for one that failed and has
        recovered; one that has not begun waits for an instance that is starting.
        """
        while True:
            route = self._choose_route(request, facts or self.routing_facts(request))
            if not isinstance(route, NoRoute):
                return route
            may_wait = request.begun or self._is_worth_waiting(request)
            if not may_wait or time.monotonic() >= request.wait_until_s:
                raise request.failure or CapacityError(route.reason)
            await asyncio.sleep(_RETRY_ROUTE_S)
            request.excluded.clear()
            facts = None

    def _choose_route(self, request: InFlightRequest, facts: RoutingFacts) -> Route | NoRoute:
        """The instance that is idle, has the prompt of another choice, or has room, if it takes requests, else any."""
        wanted = request.beside or (None if facts.cached_tokens else request.released_to)
        if request.rerouted_to is not None and all(one.instance_id != request.rerouted_to for one in request.routes):
            wanted = request.rerouted_to
        if wanted is not None:
            there = tuple(i for i in takers(facts, self._routing.stale_s) if i.instance_id == wanted)
            route = choose_route(
                msgspec.structs.replace(facts, instances=there, only_region=None), time.time(), self._routing
            )
            if isinstance(route, Route):
                return route
        return choose_route(facts, time.time(), self._routing)

    def _is_worth_waiting(self, request: InFlightRequest) -> bool:
        """Whether an instance of the model is starting, for a request that no instance has worked on. Deferred requests
        return to their queue instead.
        """
        untouched = request.failure is None or request.failure.untouched
        within_s = self._settings.request_start_wait_s
        model, tier = request.message.model, request.message.tier
        return tier != Tier.NIW and untouched and self._fleet.is_starting(model, within_s)

    @property
    def is_full(self) -> bool:
        """Whether requests wait for a connection."""
        return self._agents.is_full

    def avoided(self) -> frozenset[str]:
        """Instances and nodes that keep failing."""
        return self._circuits.avoided()

    def routing_facts(self, request: InFlightRequest) -> RoutingFacts:
        """The request, and its model's instances as they are known now."""
        message = request.message
        self._prefixes.follow(self._fleet.view)
        request.cached_tokens = self._prefixes.cached_tokens(request.prefix, request.input_tokens)
        return RoutingFacts(
            model=message.model,
            tier=message.tier,
            preference=request.preference,
            instances=self._fleet.instances(message.model),
            only_region=request.only_region,
            excluded=frozenset(request.excluded),
            avoided=self.avoided(),
            ttft_s=None if message.objective is None else message.objective.ttft_s,
            input_tokens=request.input_tokens,
            output_tokens_max=request.output_tokens_max,
            cached_tokens=request.cached_tokens,
            home_key=request.prefix.home_key,
            draw=random.getrandbits(32),
        )

    def _url(self, route: Route) -> str:
        url = self._fleet.node_url(route.node_id)
        if url is None:
            raise NodeError(f"node '{route.node_id}' has no address", untouched=True)
        return url


def _message(request: InFlightRequest, route: Route) -> Generate:
    return msgspec.structs.replace(
        request.message,
        # Clients may repeat their ids; a node takes each once.
        request_id=f"{request.message.request_id}.{uuid_utils.uuid4().hex[:16]}",
        instance_id=route.instance_id,
        generated=tuple(request.token_ids),
        sent_chars=request.sent_chars,
        text_frame=request.text_frame,
    )


def _seeded(sampling: Sampling) -> Sampling:
    """The sampling with a seed, so that an instance that continues the answer makes the tokens that the first one would
    have made.
    """
    if sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=random.getrandbits(_SEED_BITS))
