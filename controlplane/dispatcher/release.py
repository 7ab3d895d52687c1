"""The batch flow: requests are claimed for endpoints that have capacity, sent, and their results written once."""

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import anyio.to_thread
import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.dispatcher.results import ResultWriter
from controlplane.errors import CapacityError, NodeError, TidepoolError, UnknownModelError
from controlplane.policies.decisions import Release
from controlplane.policies.facts import Backoff, Endpoint, GroupFacts, ReleaseFacts
from controlplane.policies.release import ReleaseSettings, choose_backoff, choose_releases
from controlplane.serving.answers import whole_answer
from controlplane.serving.demand_counter import DemandCounter
from controlplane.serving.endpoints import ENDPOINTS, queued_query
from controlplane.serving.fan_out import InFlightQuery, send_query
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.openai_answers import openai_error
from controlplane.serving.send import Sender
from controlplane.serving.tracing import tracer
from controlplane.settings import Settings
from controlplane.store import queue
from controlplane.store.batches import ATTEMPTS_EXHAUSTED
from controlplane.store.demand import NIW
from controlplane.store.queue import Claim, Outcome
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from dataplane.protocol.messages import STALE_EPOCH

log = structlog.get_logger()
_RETRY_DELAY_MAX_S = 60.0
_NOT_TRIED = frozenset({"overloaded", "instance_not_ready", "gateway_busy", STALE_EPOCH})


class Releaser:
    """Claims requests for endpoints that have capacity, and runs each until it has a result or waits again."""

    def __init__(
        self,
        database: Database,
        live: LiveStore,
        fleet: FleetCache,
        sender: Sender,
        demand: DemandCounter,
        settings: Settings,
        *,
        retry_s: float,
    ) -> None:
        self._retry_s = retry_s
        self._database = database
        self._live = live
        self._fleet = fleet
        self._sender = sender
        self._demand = demand
        self._settings = settings
        self._policy = release_policy(settings)
        self._writer = ResultWriter(database)
        self._running: dict[asyncio.Task[None], Claim] = {}
        self._claiming: asyncio.Task[list[tuple[Endpoint, Claim]]] | None = None
        self._last_tenants: dict[str, str] = {}
        self._backoffs: dict[Endpoint, Backoff] = {}
        self._refused: set[Endpoint] = set()

    async def release(self) -> bool:
        """Gather what waits and the instances, decide, claim and start what was decided. Nothing is released while the
        live view is stale. A claim is not cancelled, so that `stop` knows what it leased. False: nothing waits.
        """
        free = self._settings.dispatcher_concurrency_max - len(self._running)
        if free <= 0 or not self._fleet.is_fresh():
            return True
        groups = await anyio.to_thread.run_sync(self._batch_groups)
        if not groups:
            return False
        reporting = await anyio.to_thread.run_sync(self._reporting_nodes)
        facts = ReleaseFacts(
            groups=groups,
            instances=tuple(instance for instance in self._fleet.instances() if instance.node_id in reporting),
            last_tenants=self._last_tenants,
        )
        facts = replace(facts, backoffs=await self._back_off(facts))
        releases = choose_releases(facts, time.time(), self._policy)
        self._claiming = asyncio.create_task(anyio.to_thread.run_sync(self._claim, releases, free))
        placed = await asyncio.shield(self._claiming)
        self._claiming = None
        for endpoint, held in placed:
            task = asyncio.create_task(self._run(held, endpoint))
            self._running[task] = held
            task.add_done_callback(self._running.pop)
        return True

    async def renew(self) -> None:
        """Renew the leases of what is running; cancel what another dispatcher holds."""
        held = dict(self._running)
        if not held:
            return
        kept = await anyio.to_thread.run_sync(self._renew, list(held.values()))
        for task, claim in held.items():
            if claim.key not in kept:
                task.cancel()

    async def stop(self) -> None:
        """Cancel what runs and return it to the queue, so that another dispatcher claims it at once."""
        held = dict(self._running)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        for claim in [*held.values(), *await self._not_started()]:
            try:
                await self._give_back(claim, "its dispatcher was stopped", tried=False, delay_s=0)
            except SQLAlchemyError:
                return  # the leases expire

    async def _not_started(self) -> list[Claim]:
        """The claims of a `release` that was cancelled while it claimed."""
        if self._claiming is None:
            return []
        [placed] = await asyncio.gather(self._claiming, return_exceptions=True)
        return [] if isinstance(placed, BaseException) else [held for _, held in placed]

    async def _back_off(self, facts: ReleaseFacts) -> dict[Endpoint, Backoff]:
        """Update the backoffs; one after a refusal holds for all dispatchers."""
        refused, self._refused = frozenset(self._refused), set()
        facts = replace(facts, backoffs=self._backoffs)
        self._backoffs = dict(choose_backoff(facts, refused, time.time(), self._policy))
        for endpoint in refused & self._backoffs.keys():
            pause_s = max(self._backoffs[endpoint].pause_s, self._settings.release_signal_s)
            await anyio.to_thread.run_sync(functools.partial(self._live.hold_signal, endpoint, for_s=pause_s))
        return self._backoffs

    def _batch_groups(self) -> tuple[GroupFacts, ...]:
        with self._database.statement() as session:
            return queue.batch_groups(session)

    def _reporting_nodes(self) -> frozenset[str]:
        """Nodes with a recent heartbeat in Redis; the cached view may hold older ones after a restart of Redis."""
        view = self._live.read_view()
        oldest_s = view.read_s - self._settings.heartbeat_stale_s
        return frozenset(name for name, node in view.nodes.items() if node.received_s >= oldest_s)

    def _claim(self, releases: Sequence[Release], free: int) -> list[tuple[Endpoint, Claim]]:
        """Lease what was decided, `free` requests at most, for all endpoints and slots that may signal now."""
        signals = functools.cache(functools.partial(self._live.take_signal, every_s=self._settings.release_signal_s))
        granted = [r for r in releases if signals(r.endpoint) and (r.slot is None or signals(r.slot))]
        wanted: Counter[tuple[int, str]] = Counter()
        for release in granted:
            count = min(release.count, free - wanted.total())
            wanted[release.batch, release.endpoint.model] += count
        if not (wanted := +wanted):
            return []
        with self._database.statement() as session:
            claims = queue.claim(session, wanted, lease_s=self._settings.niw_lease_s)
        self._last_tenants |= {release.endpoint.model: release.tenant for release in granted}
        return _placed(granted, claims)

    def _renew(self, held: list[Claim]) -> set[tuple[int, int]]:
        with self._database.transaction() as session:
            return queue.renew(session, held, lease_s=self._settings.niw_lease_s)

    async def _run(self, held: Claim, endpoint: Endpoint) -> None:
        """Run one request: an answer or a final error is its result, after anything else it waits again."""
        structlog.contextvars.bind_contextvars(request_id=_upstream_id(held))  # of this task alone
        try:
            with tracer.start_as_current_span("batch request"):
                outcome = await self._outcome(held, endpoint)
            if outcome is not None and not await self._writer.write(outcome):
                log.info("a result of a claim that is no longer the newest was dropped", request=held.fence)
        except SQLAlchemyError as error:
            log.warning("a request waits until its lease expires", request=held.fence, error=str(error).splitlines()[0])
        except Exception:
            log.exception("a defect in the dispatcher", request=held.fence)
            await self._give_back(held, "internal error", tried=True, delay_s=_RETRY_DELAY_MAX_S)

    async def _outcome(self, held: Claim, endpoint: Endpoint) -> Outcome | None:
        """The result of the request; None: it waits again."""
        try:
            return await self._answer(held, endpoint)
        except CapacityError as error:
            await self._give_back(held, error.message, tried=False, delay_s=self._retry_s)
            return None
        except TidepoolError as error:
            if error.code == "overloaded":
                self._refused.add(endpoint)
            tried = error.code not in _NOT_TRIED
            lost = isinstance(error, NodeError) and error.retryable
            last = held.attempts >= self._settings.niw_attempts_max
            if (lost or isinstance(error, UnknownModelError)) and not (tried and last):
                delay_s = min(self._retry_s * 2 ** (held.attempts - 1), _RETRY_DELAY_MAX_S)
                await self._give_back(held, error.message, tried=tried, delay_s=delay_s)
                return None
            if lost:
                message = f"{ATTEMPTS_EXHAUSTED['message']} The last of {held.attempts}: {error.message}"
                return Outcome(claim=held, error={**ATTEMPTS_EXHAUSTED, "message": message})
            return Outcome(
                claim=held, status_code=error.status, body=openai_error(error), upstream_id=_upstream_id(held)
            )

    async def _answer(self, held: Claim, endpoint: Endpoint) -> Outcome:
        query = queued_query(held.endpoint, held.body)
        messages = query.choices(_upstream_id(held), fence=held.fence, epoch=held.epoch)
        model = await self._fleet.model(query.model)
        region = endpoint.region
        in_flight = InFlightQuery.of(
            self._fleet, model, query, messages, tenant=held.tenant, origin=region, only_region=region
        )
        if held.first:
            self._demand.count(NIW, endpoint, in_flight.input_tokens)
        renderer = ENDPOINTS[held.endpoint].renderer(query, answer_id=_upstream_id(held))
        body = await whole_answer(send_query(self._sender, in_flight), in_flight, renderer)
        usage = in_flight.usage()
        return Outcome(
            claim=held,
            status_code=200,
            body=body,
            upstream_id=_upstream_id(held),
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
        )

    async def _give_back(self, held: Claim, error: str, *, tried: bool, delay_s: float) -> None:
        def write() -> None:
            with self._database.transaction() as session:
                queue.give_back(session, held, delay_s=delay_s, error=error, tried=tried)

        await anyio.to_thread.run_sync(write)


def release_policy(settings: Settings) -> ReleaseSettings:
    """The settings of the release policy."""
    return ReleaseSettings(
        below_one=settings.release_below_one,
        below_two=settings.release_below_two,
        urgent_utilization_max=settings.route_utilization_max,
        aged_s=settings.niw_age_priority_s,
        left_share=settings.niw_left_priority,
        stale_s=settings.heartbeat_stale_s,
        load_max=settings.release_load_max,
        rise_max=settings.release_rise_max,
        pause_min_s=settings.release_signal_s,
        pause_max_s=settings.release_pause_max_s,
        time_slice_s=settings.release_turn_s,
    )


def _placed(releases: Sequence[Release], claims: Sequence[Claim]) -> list[tuple[Endpoint, Claim]]:
    """The claims, each with the endpoint that it was made for."""
    waiting: dict[tuple[int, str], list[Claim]] = {}
    for claim in claims:
        waiting.setdefault((claim.batch_number, claim.model), []).append(claim)
    placed = []
    for release in releases:
        group = waiting.get((release.batch, release.endpoint.model), [])
        placed += [(release.endpoint, claim) for claim in group[: release.count]]
        del group[: release.count]
    return placed


def _upstream_id(held: Claim) -> str:
    return f"niw_{held.batch_number}_{held.line}_{held.epoch}"
