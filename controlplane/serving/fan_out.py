"""One query to the fleet: each of its choices is a request with a seed, a continuation and a failover of its own. Those
that share a prompt are sent to the first one's instance after its first token, so that the instance's prefix cache
makes it one prefill.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import anyio

from controlplane.errors import NodeError
from controlplane.policies.facts import RoutingFacts
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.in_flight import InFlightRequest, check_task
from controlplane.serving.query import Query
from controlplane.serving.send import Sender
from controlplane.store.tables import Model
from dataplane.protocol.messages import Generate, Started
from dataplane.protocol.records import RecordedEvent

POOLED_AT_ONCE = 32
"""Prompts of one query to embed or to score that are sent at a time."""
_PROMPT_FIELDS = frozenset({"messages", "prompt", "prompt_tokens"})
ChoiceStream = AsyncGenerator[tuple[int, list[RecordedEvent]], None]
"""The events of a query: the number of the choice, and those of its events that arrived together."""


@dataclass(frozen=True, kw_only=True)
class TokenUsage:
    """The tokens of a query: each prompt's once, those of all its answers together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(kw_only=True)
class InFlightQuery:
    """A query in flight. `choices`: a request for each answer; `best_of` of them follow each other for each prompt, of
    which the first one is the leader.
    """

    query: Query
    choices: list[InFlightRequest]

    @classmethod
    def of(
        cls,
        fleet: FleetCache,
        model: Model,
        query: Query,
        messages: Sequence[Generate],
        *,
        tenant: str,
        origin: str | None,
        only_region: str | None = None,
    ) -> "InFlightQuery":
        """A query that begins now, with its `choices` as messages.

        Raises:
            ContextLengthError: `max_tokens` alone is beyond the model's context.
            WrongTaskError: the model does not answer with what is asked for.
        """
        check_task(query.task, model)
        choices: list[InFlightRequest] = []
        for number, message in enumerate(messages):
            of_prompt = number % query.best_of
            choice = InFlightRequest.of(
                fleet,
                model,
                message,
                tenant=tenant,
                origin=origin,
                only_region=only_region,
                prompt_cache_key=query.prompt_cache_key,
                prefix=choices[-of_prompt].prefix if of_prompt else None,
            )
            choices.append(choice)
        return cls(query=query, choices=choices)

    @property
    def first(self) -> InFlightRequest:
        return self.choices[0]

    @property
    def leaders(self) -> list[InFlightRequest]:
        return self.choices[:: self.query.best_of]

    def leader_of(self, choice: int) -> InFlightRequest:
        return self.choices[choice - choice % self.query.best_of]

    @property
    def input_tokens(self) -> int:
        """An estimate of the tokens of all prompts."""
        return sum(leader.input_tokens for leader in self.leaders)

    @property
    def tokens(self) -> int:
        """An estimate of prompt and completion tokens together, as limits count them."""
        return self.input_tokens + sum(choice.tokens - choice.input_tokens for choice in self.choices)

    @property
    def tokens_max(self) -> int:
        """The most tokens that it may take, as budgets count them."""
        return sum(choice.tokens_max for choice in self.choices)

    @property
    def used_tokens(self) -> int:
        """Prompt and completion tokens so far; 0 until a node has the first request."""
        return self.prompt_tokens + sum(choice.used_tokens - choice.prompt_tokens for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of those prompts that a node has."""
        return sum(leader.prompt_tokens for leader in self.leaders)

    @property
    def output_tokens(self) -> int:
        """The tokens that have arrived."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def usage(self) -> TokenUsage:
        """The tokens of the choices that have ended."""
        prompt_tokens = cached_tokens = completion_tokens = reasoning_tokens = 0
        for number, choice in enumerate(self.choices):
            if (end := choice.end) is not None:
                completion_tokens += end.completion_tokens
                reasoning_tokens += end.reasoning_tokens
                if number % self.query.best_of == 0:
                    prompt_tokens += end.prompt_tokens
                    cached_tokens += end.cached_tokens
        return TokenUsage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
            reasoning_tokens=reasoning_tokens,
        )


async def send_query(sender: Sender, query: InFlightQuery, facts: RoutingFacts | None = None) -> ChoiceStream:
    """The events of all choices, as they arrive. Leaving the iteration early cancels all; the first failure of any
    choice ends the others. `facts`: those by which the query has just been admitted.

    Raises:
        CapacityError: no instance can take a choice now.
        NodeError: the request is at fault, or every instance that was tried for one of its choices failed.
    """
    if len(query.choices) == 1:
        with _field_named(query.query, 0):
            async with aclosing(sender.send(query.first, facts)) as stream:
                async for events in stream:
                    yield 0, events
        return
    fan = _FanOut(sender, query, facts)
    try:
        async for arrived in fan.events():
            yield arrived
    finally:
        await fan.cancel()


@contextmanager
def _field_named(query: Query, choice: int) -> Iterator[None]:
    """Let a node's refusal of a prompt name the field that the client wrote it in."""
    try:
        yield
    except NodeError as error:
        if query.input_field and error.param in _PROMPT_FIELDS:
            number = f".{choice // query.best_of}" if len(query.prompts) > 1 else ""
            error.param = f"{query.input_field}{number}"
        raise


class _FanOut:
    """The choices of a query, each sent by a task. Only as many arrivals wait as there are choices, so that a slow
    client slows all of them down. Of prompts that are not answered with text, `POOLED_AT_ONCE` run at a time.
    """

    def __init__(self, sender: Sender, query: InFlightQuery, facts: RoutingFacts | None) -> None:
        self._sender = sender
        self._query = query
        self._facts = facts
        self._arrived: asyncio.Queue[tuple[int, list[RecordedEvent]] | Exception | None] = asyncio.Queue(
            maxsize=len(query.choices)
        )
        self._begun = {id(leader): asyncio.Event() for leader in query.leaders}
        pooled = query.query.task != "generate"
        self._turns = asyncio.Semaphore(POOLED_AT_ONCE if pooled else len(query.choices))
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in range(len(query.choices))]

    async def events(self) -> ChoiceStream:
        """What arrives, until all choices have ended."""
        running = len(self._tasks)
        while running:
            arrived = await self._arrived.get()
            if isinstance(arrived, Exception):
                raise arrived
            if arrived is None:
                running -= 1
            else:
                yield arrived

    async def cancel(self) -> None:
        """End what still runs; its nodes stop."""
        for task in self._tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):  # the caller may be cancelled itself
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, choice: int) -> None:
        try:
            with _field_named(self._query.query, choice):
                async with self._turns:
                    await self._send(choice)
        except Exception as error:  # whatever it is, it ends the whole query
            await self._arrived.put(error)
        else:
            await self._arrived.put(None)

    async def _send(self, choice: int) -> None:
        request, leader = self._query.choices[choice], self._query.leader_of(choice)
        begun = self._begun[id(leader)]
        if request is not leader:
            await begun.wait()
            request.beside = leader.routes[-1].instance_id
        async with aclosing(self._sender.send(request, None if choice else self._facts)) as stream:
            async for events in stream:
                await self._arrived.put((choice, events))
                if request is leader and not begun.is_set() and not isinstance(events[-1], Started):
                    begun.set()
