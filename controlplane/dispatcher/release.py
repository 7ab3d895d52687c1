"""The batch flow: endpoints signal room, requests are claimed for them, sent, and their results written once."""

import asyncio
import time
from typing import Any

import anyio.to_thread
import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.errors import CapacityError, NodeError, TidepoolError
from controlplane.policies.decisions import Release
from controlplane.policies.facts import Endpoint, QueueFacts, ReleaseFacts, Tier
from controlplane.policies.release import ReleaseSettings, choose_releases
from controlplane.serving.demand import DemandCounter
from controlplane.serving.fleet import FleetCache
from controlplane.serving.openai_answers import AnswerHead, collect, openai_error
from controlplane.serving.openai_requests import parse_body, served_as, to_outgoing
from controlplane.serving.send import Sender
from controlplane.settings import Settings
from controlplane.store import queue
from controlplane.store.demand import NIW
from controlplane.store.live import LiveStore
from controlplane.store.queue import Claim
from controlplane.store.session import Database

log = structlog.get_logger()
_RETRY_DELAY_S = 1.0
_RETRY_DELAY_MAX_S = 60.0
_NOBODY_TRIED = frozenset({"overloaded", "instance_not_ready"})
_WRITE_RETRY_S = 1.0


class Releaser:
    """Claims requests when there is room and sees each through to its result."""

    def __init__(
        self,
        database: Database,
        live: LiveStore,
        fleet: FleetCache,
        sender: Sender,
        demand: DemandCounter,
        settings: Settings,
    ) -> None:
        self._database = database
        self._live = live
        self._fleet = fleet
        self._sender = sender
        self._demand = demand
        self._settings = settings
        self._policy = ReleaseSettings(
            below_one=settings.release_below_one,
            below_two=settings.release_below_two,
            aged_utilization_max=settings.route_utilization_max,
            stale_s=settings.heartbeat_stale_s,
        )
        self._running: dict[asyncio.Task[None], Claim] = {}
        self._claimed: list[Claim] = []

    async def release(self) -> None:
        """One look: gather queues and instances, decide, claim and start what was decided."""
        room = self._settings.dispatcher_concurrency_max - len(self._running)
        if room <= 0:
            return
        queues = await anyio.to_thread.run_sync(self._queues)
        if not queues:
            return
        facts = ReleaseFacts(queues=queues, instances=self._fleet.instances())
        for decision in choose_releases(facts, time.time(), self._policy):
            claims = await anyio.to_thread.run_sync(self._claim, decision, room)
            room -= len(claims)
            for held in claims:
                task = asyncio.create_task(self._run(held, decision.endpoint.region))
                self._running[task] = held
                self._claimed.remove(held)
                task.add_done_callback(self._running.pop)

    async def renew(self) -> None:
        """Keep the leases of what is running; stop what is no longer ours."""
        held = dict(self._running)
        if not held:
            return
        kept = await anyio.to_thread.run_sync(self._renew, list(held.values()))
        for task, claim in held.items():
            if claim.request_id not in kept:
                task.cancel()

    async def stop(self) -> None:
        """Break off what runs and give it back, so that another dispatcher takes it at once."""
        held = dict(self._running)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        for claim in [*held.values(), *self._claimed]:
            try:
                await self._give_back(claim, "its dispatcher was stopped", tried=False, delay_s=0)
            except SQLAlchemyError:
                return  # the leases run out by themselves

    def _queues(self) -> tuple[QueueFacts, ...]:
        with self._database.transaction() as session:
            return queue.queue_facts(session, aged_s=self._settings.niw_age_priority_s)

    def _claim(self, decision: Release, room: int) -> list[Claim]:
        if room <= 0 or not self._live.take_signal(decision.endpoint, every_s=self._settings.release_signal_s):
            return []
        with self._database.transaction() as session:
            claims = queue.claim(
                session,
                model=decision.endpoint.model,
                count=min(decision.count, room),
                lease_s=self._settings.niw_lease_s,
            )
        self._claimed += claims  # until each has its task: a stop in between gives them back
        return claims

    def _renew(self, held: list[Claim]) -> set[int]:
        with self._database.transaction() as session:
            return queue.renew(session, held, lease_s=self._settings.niw_lease_s)

    async def _run(self, held: Claim, region: str) -> None:
        """See one request through: an answer or a final error is its result, anything else sends it back."""
        upstream_id = f"niw_{held.request_id}_{held.attempts}"
        try:
            body = await self._answer(held, region, upstream_id)
            await self._finish(held, 200, body, upstream_id)
        except CapacityError as error:
            await self._give_back(held, error.message, tried=False)
        except TidepoolError as error:
            retryable = isinstance(error, NodeError) and error.retryable
            tried = error.code not in _NOBODY_TRIED
            if retryable and (not tried or held.attempts < self._settings.niw_attempts_max):
                delay_s = min(_RETRY_DELAY_S * 2 ** (held.attempts - 1), _RETRY_DELAY_MAX_S)
                await self._give_back(held, error.message, tried=tried, delay_s=delay_s)
            else:
                await self._finish(held, error.status, openai_error(error), upstream_id)
        except SQLAlchemyError as error:
            log.warning(
                "a request waits for its lease to end", request=held.request_id, error=str(error).splitlines()[0]
            )
        except Exception:
            log.exception("a defect in the dispatcher", request=held.request_id)
            await self._give_back(held, "internal error", tried=True, delay_s=_RETRY_DELAY_MAX_S)

    async def _answer(self, held: Claim, region: str, upstream_id: str) -> dict[str, Any]:
        request = parse_body(held.endpoint, held.body)
        model = await self._fleet.model(request.model)
        outgoing = to_outgoing(request, model, request_id=upstream_id, tier=Tier.NIW, origin=region, only_region=region)
        self._demand.count(NIW, Endpoint(model=model.name, region=region), outgoing.input_tokens_guess())
        head = AnswerHead.of(request, request_id=upstream_id, service_tier=served_as(Tier.NIW))
        return await collect(self._sender.send(outgoing), head)

    async def _finish(self, held: Claim, status_code: int, body: dict[str, Any], upstream_id: str) -> None:
        def write() -> bool:
            with self._database.transaction() as session:
                return queue.finish(session, held, status_code=status_code, body=body, upstream_id=upstream_id)

        while True:
            try:
                written = await anyio.to_thread.run_sync(write)
            except SQLAlchemyError:
                await asyncio.sleep(_WRITE_RETRY_S)  # the answer is worth waiting for; a lost lease ends the wait
                continue
            if not written:
                log.info("a result came too late and was dropped", request=held.request_id)
            return

    async def _give_back(self, held: Claim, error: str, *, tried: bool, delay_s: float = _RETRY_DELAY_S) -> None:
        def write() -> None:
            with self._database.transaction() as session:
                queue.give_back(session, held, delay_s=delay_s, error=error, tried=tried)

        await anyio.to_thread.run_sync(write)
