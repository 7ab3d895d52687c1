"""The batch flow: requests are claimed for endpoints that have capacity, sent, and their results written once."""

import asyncio
import functools
import math
import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import anyio.to_thread
import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.dispatcher.in_flight import Line, LinesInFlight
from controlplane.dispatcher.results import ResultWriter
from controlplane.dispatcher.waiting_groups import CLAIMS_MAX, WaitingGroups
from controlplane.errors import CapacityError, NodeError, TidepoolError, UnknownModelError
from controlplane.policies.decisions import Release
from controlplane.policies.facts import Endpoint, ReleaseFacts, Window
from controlplane.policies.release import ReleaseSettings, choose_releases, choose_windows, expected_tokens, has_room
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
from controlplane.store.demand import IW, NIW
from controlplane.store.queue import Claim, Outcome
from controlplane.store.redis.live import LiveStore, WindowTaken
from controlplane.store.session import Database
from dataplane.protocol.messages import INSTANCE_NOT_READY, STALE_EPOCH

log = structlog.get_logger()
_RETRY_DELAY_MAX_S = 60.0
_RENEWED_AT_ONCE, _RETURNED_AT_ONCE = 50, 500
_DEMAND_KEEP_S = 1.0
_COUNTS_FRESH_S = 10.0
"""How long the requests of a dispatcher that is gone count in flight."""
_REFUSED = frozenset({"overloaded", "invalid_node_key"})
_NOT_TRIED = frozenset({*_REFUSED, "gateway_busy", STALE_EPOCH})


class Releaser:
    """Claims requests for endpoints that have capacity, and runs each until it has a result or waits again. `woken` is
    called when one has ended, so that there may be room again.
    """

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
        poll_s: float,
        woken: Callable[[], None],
    ) -> None:
        self._retry_s = retry_s
        self._woken = woken
        self._live = live
        self._fleet = fleet
        self._sender = sender
        self._demand = demand
        self._settings = settings
        self._policy = release_policy(settings)
        self._database = database
        self._waiting = WaitingGroups(database, poll_s=poll_s)
        self._writer = ResultWriter(database)
        self._name = secrets.token_hex(8)
        self._lines = LinesInFlight()
        self._running: dict[asyncio.Task[None], Claim] = {}
        self._claiming: asyncio.Task[list[tuple[Release, Claim]]] | None = None
        self._last_tenants: dict[str, str] = {}
        self._refused: set[Endpoint] = set()
        self._demanded: frozenset[Endpoint] = frozenset()
        self._demand_read_s = -math.inf

    async def release(self) -> bool:
        """Gather what waits and the instances, decide, claim and start what was decided. Nothing is released while the
        live view is stale. A claim is not cancelled, so that `stop` knows what it leased. False: nothing waits.
        """
        free = self._settings.dispatcher_concurrency_max - len(self._running)
        if free <= 0 or not self._fleet.is_fresh():
            return True
        reporting = self._fleet.reporting_nodes()
        reported = (each for each in self._fleet.instances() if each.node_id in reporting)
        instances = self._lines.tell_apart(reported, self._fleet.reported_at_s())
        if not has_room(instances, self._policy):
            return True
        groups = await self._waiting.read()
        if not groups:
            return False
        facts = ReleaseFacts(
            groups=groups, instances=instances, last_tenants=self._last_tenants, count_max=min(free, CLAIMS_MAX)
        )
        self._claiming = asyncio.create_task(anyio.to_thread.run_sync(self._decide, facts))
        placed = await asyncio.shield(self._claiming)
        self._claiming = None
        tokens = {(group.batch, group.model): expected_tokens(group, self._policy) for group in groups}
        for release, held in placed:
            line = self._lines.begin(held, release, tokens[held.batch_number, held.model])
            task = asyncio.create_task(self._run(line))
            self._running[task] = held
            task.add_done_callback(functools.partial(self._ended, line))
        return True

    def forget_waiting(self) -> None:
        """Read anew what waits: the queue has changed."""
        self._waiting.forget()

    def _ended(self, line: Line, task: "asyncio.Task[None]") -> None:
        del self._running[task]
        self._leave(line)
        self._waiting.note_ended()
        self._woken()

    def _leave(self, line: Line) -> None:
        """Count a line as no longer in flight."""
        if line.ended_s is None:
            self._lines.end(line)
            self._woken()

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
        claims = [*held.values(), *await self._not_started()]
        claims.sort(key=lambda claim: claim.key)  # as results are written, so that no two wait for each other's rows
        for first in range(0, len(claims), _RETURNED_AT_ONCE):
            some = claims[first : first + _RETURNED_AT_ONCE]
            try:
                await self._give_back(*some, error="its dispatcher was stopped", tried=False, delay_s=0)
            except SQLAlchemyError as error:
                text = str(error).splitlines()[0]
                log.warning("requests wait until their leases expire", requests=len(some), error=text)

    async def _not_started(self) -> list[Claim]:
        """The claims of a `release` that was cancelled while it claimed."""
        if self._claiming is None:
            return []
        [placed] = await asyncio.gather(self._claiming, return_exceptions=True)
        return [] if isinstance(placed, BaseException) else [held for _, held in placed]

    def _decide(self, facts: ReleaseFacts) -> list[tuple[Release, Claim]]:
        """Step the windows of all endpoints of models that wait, and lease what has room and fits them."""
        models = {group.model for group in facts.groups}
        endpoints = {each.endpoint for each in facts.instances if each.endpoint.model in models}
        own = self._lines.by_endpoint()
        now_s, before = self._live.read_windows(endpoints)
        in_flight = self._live.count_in_flight(
            self._name, {endpoint: own.get(endpoint, 0) for endpoint in endpoints}, fresh_s=_COUNTS_FRESH_S
        )
        facts = replace(facts, windows=before, in_flight=in_flight, interactive=self._interactive(now_s))
        refused, self._refused = frozenset(self._refused), set()
        after = choose_windows(facts, refused, now_s, self._policy)
        releases = choose_releases(replace(facts, windows=after), now_s, self._policy)
        return self._claim(self._granted(releases, before, after, own))

    def _interactive(self, now_s: float) -> frozenset[Endpoint]:
        """The endpoints that were asked for interactive answers in this minute or the last one, read once a second."""
        if now_s - self._demand_read_s > _DEMAND_KEEP_S:
            minute_s = int(now_s) // 60 * 60
            counts = [count for at_s in (minute_s - 60, minute_s) for count in self._live.read_demand(at_s) or ()]
            self._demanded = frozenset(count.endpoint for count in counts if count.kind == IW)
            self._demand_read_s = now_s
        return self._demanded

    def _granted(
        self,
        releases: Sequence[Release],
        before: Mapping[Endpoint, Window],
        after: Mapping[Endpoint, Window],
        own: Mapping[Endpoint, int],
    ) -> list[Release]:
        """Store the windows, and take from them what is still there: another dispatcher may have been faster."""
        wanted = Counter((release.endpoint, release.urgent) for release in releases)
        taken = {
            endpoint: WindowTaken(
                before=before.get(endpoint),
                after=window,
                in_flight=own.get(endpoint, 0),
                wanted=wanted[endpoint, False],
                urgent=wanted[endpoint, True],
            )
            for endpoint, window in after.items()
        }
        left = Counter(self._live.take_windows(self._name, taken, fresh_s=_COUNTS_FRESH_S))
        granted = []
        for release in releases:
            if release.urgent or left[release.endpoint] > 0:
                granted.append(release)
                left[release.endpoint] -= not release.urgent
        return granted

    def _claim(self, granted: Sequence[Release]) -> list[tuple[Release, Claim]]:
        wanted = Counter((release.batch, release.endpoint.model) for release in granted)
        if not wanted:
            return []
        with self._database.statement() as session:
            claims = queue.claim(session, wanted, lease_s=self._settings.niw_lease_s)
        self._waiting.note_claimed(wanted, claims)
        self._last_tenants |= {release.endpoint.model: release.tenant for release in granted}
        return _placed(granted, claims)

    def _renew(self, held: list[Claim]) -> set[tuple[int, int]]:
        """A few at a time: a statement that names many rows scans the queue for them, and locks those it has found."""
        kept: set[tuple[int, int]] = set()
        for first in range(0, len(held), _RENEWED_AT_ONCE):
            with self._database.transaction(replicated=False) as session:
                some = held[first : first + _RENEWED_AT_ONCE]
                kept |= queue.renew(session, some, lease_s=self._settings.niw_lease_s)
        return kept

    async def _run(self, line: Line) -> None:
        """Run one request: an answer or a final error is its result, after anything else it waits again."""
        held = line.claim
        structlog.contextvars.bind_contextvars(request_id=_upstream_id(held))  # of this task alone
        try:
            with tracer.start_as_current_span("batch request"):
                outcome = await self._outcome(line)
            self._leave(line)  # its instance has room again while the result is written
            if outcome is not None and not await self._writer.write(outcome):
                log.info("a result of a claim that is no longer the newest was dropped", request=held.fence)
        except SQLAlchemyError as error:
            log.warning("a request waits until its lease expires", request=held.fence, error=str(error).splitlines()[0])
        except Exception:
            log.exception("a request whose result was not written waits until its lease expires", request=held.fence)

    async def _outcome(self, line: Line) -> Outcome | None:
        """The result of the request; None: it waits again."""
        held = line.claim
        try:
            return await self._answer(line)
        except CapacityError as error:
            await self._give_back(held, error=error.message, tried=False, delay_s=self._retry_s)
            return None
        except TidepoolError as error:
            untouched = isinstance(error, NodeError) and error.untouched
            if error.code in _REFUSED or (untouched and error.code != INSTANCE_NOT_READY):
                self._refused.add(line.sent_to)
            tried = not untouched and error.code not in _NOT_TRIED
            lost = isinstance(error, NodeError) and error.retryable
            last = held.attempts >= self._settings.niw_attempts_max
            if (lost or isinstance(error, UnknownModelError)) and not (tried and last):
                delay_s = min(self._retry_s * 2 ** (held.attempts - 1), _RETRY_DELAY_MAX_S)
                await self._give_back(held, error=error.message, tried=tried, delay_s=delay_s)
                return None
            if lost:
                return _exhausted(held, error.message)
            return Outcome(
                claim=held, status_code=error.status, body=openai_error(error), upstream_id=_upstream_id(held)
            )
        except SQLAlchemyError:
            raise
        except Exception:
            log.exception("a defect in the dispatcher", request=held.fence)
            if held.attempts >= self._settings.niw_attempts_max:
                return _exhausted(held, "internal error")
            await self._give_back(held, error="internal error", tried=True, delay_s=_RETRY_DELAY_MAX_S)
            return None

    async def _answer(self, line: Line) -> Outcome:
        held = line.claim
        query = queued_query(held.endpoint, held.body)
        messages = query.choices(_upstream_id(held), fence=held.fence, epoch=held.epoch)
        model = await self._fleet.model(query.model)
        region = line.endpoint.region
        line.query = in_flight = InFlightQuery.of(
            self._fleet, model, query, messages, tenant=held.tenant, origin=region, only_region=region
        )
        in_flight.first.released_to = line.released_to
        if held.first:
            self._demand.count(NIW, line.endpoint, in_flight.input_tokens)
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

    async def _give_back(self, *held: Claim, error: str, tried: bool, delay_s: float) -> None:
        def write() -> None:
            with self._database.transaction() as session:
                queue.give_back(session, *held, delay_s=delay_s, error=error, tried=tried)

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
        queue_share=settings.release_queue_share,
        tokens_guess=settings.release_tokens_guess,
        growth=settings.release_growth,
        growth_after_cut=settings.release_growth_after_cut,
        calm_s=settings.release_calm_s,
        cut=settings.release_cut,
        hold_s=settings.release_hold_s,
        late_share=settings.release_late_share,
        beside_share=settings.release_beside_share,
        signal_s=settings.release_signal_s,
        iw_f_ttft_s=settings.slo_iw_f_ttft_s,
        iw_n_ttft_s=settings.slo_iw_n_ttft_s,
        load_max=settings.release_load_max,
        rise_max=settings.release_rise_max,
        time_slice_s=settings.release_turn_s,
    )


def _placed(releases: Sequence[Release], claims: Sequence[Claim]) -> list[tuple[Release, Claim]]:
    """The claims, each with a release that it was made for: of a batch, lines that follow each other for each instance,
    as they may have a common beginning.
    """
    waiting: dict[tuple[int, str], deque[Claim]] = {}
    for claim in claims:
        waiting.setdefault((claim.batch_number, claim.model), deque()).append(claim)
    placed = []
    for release, count in Counter(releases).items():
        group = waiting.get((release.batch, release.endpoint.model), deque())
        placed += [(release, group.popleft()) for _ in range(min(count, len(group)))]
    return placed


def _exhausted(held: Claim, why: str) -> Outcome:
    """The end of a request whose last attempt failed, too."""
    message = f"{ATTEMPTS_EXHAUSTED['message']} The last of {held.attempts}: {why}"
    return Outcome(claim=held, error={**ATTEMPTS_EXHAUSTED, "message": message})


def _upstream_id(held: Claim) -> str:
    return f"niw_{held.batch_number}_{held.line}_{held.epoch}"
