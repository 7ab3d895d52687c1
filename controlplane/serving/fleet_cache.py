"""A gateway's or dispatcher's cache of the fleet: the live view from Redis and the catalog from Postgres.

Both are refreshed in the background; while a source is unavailable, its last copy is used. A process that starts
without Redis reads its first view from Postgres.

A view is a second old, and several processes send by it. So those that are busy tell each other many times a second
what they have sent since; else all would send to the instance that seems emptiest until it reports again.
"""

import asyncio
import contextlib
import functools
import hashlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from typing import Literal

import anyio
import anyio.to_thread
import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.errors import TidepoolError, UnavailableError, UnknownModelError
from controlplane.policies.aliases import choose_model
from controlplane.policies.facts import InstanceFacts
from controlplane.policies.objectives import choose_objective
from controlplane.policies.routing import choose_preference
from controlplane.serving.background import in_background
from controlplane.serving.in_flight_tokens import Sending, SentTokens
from controlplane.serving.regional_reads import RegionalReads
from controlplane.settings import Settings
from controlplane.store.fleet import Catalog, load_catalog
from controlplane.store.redis.live import EMPTY_VIEW, FleetView, LiveStore, SentElsewhere, instance_facts
from controlplane.store.stored_view import stored_view
from controlplane.store.tables import Model
from dataplane.protocol.tiers import Objective, Tier

log = structlog.get_logger()
ModelState = Literal["ready", "starting", "none"]
_VIEW, _CATALOG, _SENT = "live view", "catalog", "what others have sent"
_CATALOG_REFRESH_S = 2.0
_LOOK_UP_EVERY_S = 1.0
"""The shortest interval between reads of the catalog for unknown names, which clients can invent."""
_VIEW_KEEP_S = 600.0
_SHARES_SENT_S = 5.0
"""For how long after its last request a process exchanges with others what they send."""
_HEARD_SOON_S = 0.1
"""How long an exchange may take for what it tells to count."""
_AGE_STEP_S = 0.5
"""The precision of instances' ages."""


class FleetCache:
    """The live view (refreshed several times a second), the catalog of models and regions (every two seconds), and the
    tokens that were sent to each instance since its last heartbeat, by this process and by others.
    """

    def __init__(self, reads: RegionalReads, live: LiveStore, settings: Settings) -> None:
        self._reads = reads
        self._live = live
        self._settings = settings
        self._view: FleetView = EMPTY_VIEW
        self._view_at = 0.0
        self._catalog = Catalog(models={}, regions=(), nodes={})
        self._view_away = self._has_view = self._has_catalog = False
        self._looking_up = asyncio.Lock()
        self._catalog_asked_s = -math.inf
        self._view_threads, self._catalog_threads = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
        self._sent_threads = anyio.CapacityLimiter(1)
        self._sent = SentTokens()
        self._process, self._heard = secrets.token_hex(8), "0-0"
        self._reported_s: Mapping[str, float] = {}
        self._placed_s: dict[str, float] = {}
        self._made_s = time.monotonic()
        self._facts: dict[str, dict[str, InstanceFacts]] = {}
        self._facts_of: tuple[FleetView, Catalog, float] = (EMPTY_VIEW, self._catalog, 0.0)
        self._change = asyncio.Event()
        self._reporting: frozenset[str] = frozenset()
        self._objectives = {
            Tier.IW_F: Objective(ttft_s=settings.slo_iw_f_ttft_s, tbt_s=settings.slo_iw_f_tbt_s),
            Tier.IW_N: Objective(ttft_s=settings.slo_iw_n_ttft_s, tbt_s=settings.slo_iw_n_tbt_s),
        }

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Read both once (errors are logged, not raised), then refresh them while the block runs."""
        await self._refresh_catalog()
        await self._refresh_view()
        async with (
            in_background(self._repeat(self._refresh_view, self._settings.view_refresh_s, _VIEW)),
            in_background(self._repeat(self._refresh_catalog, _CATALOG_REFRESH_S, _CATALOG)),
            in_background(self._repeat(self._exchange_sent, self._settings.sent_share_every_s, _SENT)),
        ):
            yield

    async def model(self, name: str) -> Model:
        """A registered model; an unknown name is looked up in Postgres, within about a second.

        Raises:
            UnknownModelError: it is not registered.
        """
        if name not in self._catalog.models:
            await self._look_up()
        return self._registered(name)

    def _registered(self, name: str) -> Model:
        found = self._catalog.models.get(name)
        if found is None:
            raise UnknownModelError(f"The model '{name}' does not exist.", param="model")
        return found

    async def asked(self, name: str, conversation: bytes = b"") -> Model:
        """The model that answers a request for a name: the model of that name, or one of the alias's, always the same
        one for a conversation while the weights stay. Models without a ready instance get no request while others have
        one.

        Raises:
            UnknownModelError: the name is neither a model nor an alias.
        """
        if name not in self._catalog.aliases and name not in self._catalog.models:
            await self._look_up()
        weights = self._catalog.aliases.get(name)
        if weights is None:
            return self._registered(name)
        absent = [model for model, weight in weights.items() if weight and self.state_of(model) != "ready"]
        return self._registered(choose_model(weights, conversation, absent=absent))

    def models(self) -> list[Model]:
        return [self._catalog.models[name] for name in sorted(self._catalog.models)]

    def aliases(self) -> dict[str, dict[str, int]]:
        """The weights of models by alias."""
        return self._catalog.aliases

    def models_of(self, name: str) -> list[Model]:
        """The models that requests for a name may get: its own, or those of the alias that have a weight.

        Raises:
            UnknownModelError: the name is neither a model nor an alias.
        """
        weights = self._catalog.aliases.get(name, {name: 1})
        return [self._registered(model) for model, weight in weights.items() if weight]

    def context_tokens(self, model: Model) -> int:
        """Tokens of prompt and answer together that every ready instance of a model takes: fewer than its context where
        a node's KV memory holds no more.
        """
        reports = (report for node in self._view.nodes.values() for report in node.heartbeat.instances)
        reported = (each.context_tokens for each in reports if each.model == model.name and each.state == "ready")
        return min([model.context_tokens, *(tokens for tokens in reported if tokens is not None)])

    def state_of(self, model: str) -> ModelState:
        """Whether a model's requests would run now."""
        stale_s = self._settings.heartbeat_stale_s
        instances = self.instances(model)
        if any(each.accepting and each.age_s <= stale_s for each in instances):
            return "ready"
        reports = (report for node in self._view.nodes.values() for report in node.heartbeat.instances)
        loading = any(each.model == model and each.state == "loading" for each in reports)
        return "starting" if loading or self._is_placed(model) else "none"

    def preference(self, origin: str | None) -> tuple[str, ...]:
        """The regions in the order in which a request from `origin` prefers them."""
        return choose_preference(self._catalog.regions, origin, self._catalog.latencies_ms)

    def node_url(self, node: str) -> str | None:
        view = self._view.nodes.get(node)
        return view.url if view is not None else self._catalog.nodes.get(node)

    def instances(self, model: str | None = None) -> tuple[InstanceFacts, ...]:
        """Every instance of the view, or of one model, aged by the time since the view was read, with the tokens sent
        since its heartbeat. The facts of a model are built once for a view. While Redis is unavailable, the view does
        not age for ten minutes: requests are routed by the last reports, and failures show which instances are gone.
        """
        self._drop_old_facts()
        if model is None:
            return self._make_facts(None)
        facts = self._facts.get(model)
        if facts is None:
            facts = self._facts[model] = {each.instance_id: each for each in self._make_facts(model)}
        return tuple(facts.values())

    def _make_facts(self, model: str | None) -> tuple[InstanceFacts, ...]:
        view, catalog, aged_s = self._facts_of
        aged = FleetView(read_s=view.read_s + aged_s, nodes=view.nodes)
        return instance_facts(aged, models=catalog.models, sent=self._sent.of, model=model)

    def _drop_old_facts(self) -> None:
        """Drop the facts of older views and catalogs, and those whose age has changed."""
        before, catalog, aged_s = self._facts_of
        view, now_aged_s = self._view, self._aged_s()
        if view is not before:
            self._sent.forget(self._reported_s)
        if view is not before or catalog is not self._catalog or abs(now_aged_s - aged_s) > _AGE_STEP_S:
            self._facts, self._facts_of = {}, (view, self._catalog, now_aged_s)

    def reporting_nodes(self) -> frozenset[str]:
        """Nodes of which Redis had a recent heartbeat when it was last read; `instances` may hold older ones after a
        restart of Redis.
        """
        return self._reporting

    @property
    def view(self) -> FleetView:
        """The last view that was read."""
        return self._view

    def cache_salt(self, tenant: str, given: str) -> str:
        """The salt of a tenant's cached prefixes. By the time to the first token nobody can learn what another tenant
        asked, nor whoever does not know the salt that was `given`.
        """
        return _cache_salt("" if self._settings.prefix_cache_shared else tenant, given)

    def is_starting(self, model: str, within_s: float) -> bool:
        """Whether an instance of the model is on some node, or was within so many seconds, or is placed and not yet
        reported: it may soon be ready, and a node may restart. A process that has just started answers yes.
        """
        return time.monotonic() - self._placed_s.get(model, self._made_s) <= within_s or self._is_placed(model)

    def _is_placed(self, model: str) -> bool:
        known = self._catalog.models.get(model)
        host = known.base if known is not None and known.with_base else model
        return host in self._catalog.placed

    def objective(self, model: Model, tier: Tier) -> Objective | None:
        """The objective of a model and tier; None for deferred requests."""
        return choose_objective(tier, model.slo, self._objectives)

    def note_sent(self, instance_id: str, tokens: int, input_tokens: int = 0) -> Sending:
        """Count a request of `tokens`, with `input_tokens` in its prompt, until the instance's next heartbeat."""
        sending = self._sent.add(instance_id, tokens, input_tokens)
        self._show_sent({instance_id})
        return sending

    def note_refused(self, instance_id: str, sending: Sending) -> None:
        """Uncount a request that the instance refused."""
        self._drop_old_facts()
        self._sent.take_back(instance_id, sending)
        self._show_sent({instance_id})
        self._note_change()

    def note_ended(self, instance_id: str, sending: Sending) -> None:
        """Uncount a request that has ended, unless the instance has reported since it was sent."""
        self.note_refused(instance_id, sending)

    async def changed(self) -> None:
        """Wait until the view was read again, or a request that counted has ended or was refused."""
        await self._change.wait()

    def _note_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _show_sent(self, instances: Set[str]) -> None:
        """Update the facts of instances."""
        for facts in list(self._facts.values()):
            for instance_id in facts.keys() & instances:
                sent = self._sent.of(instance_id)
                facts[instance_id] = msgspec.structs.replace(
                    facts[instance_id],
                    sent_tokens=sent.tokens,
                    sent_input_tokens=sent.input_tokens,
                    sent_requests=sent.requests,
                )

    def reported_at_s(self) -> Mapping[str, float]:
        """When Redis received each instance's last report, on this process's monotonic clock."""
        return self._reported_s

    def _aged_s(self) -> float:
        unread_s = time.monotonic() - self._view_at
        return 0.0 if self._view_away and self._has_view and unread_s < _VIEW_KEEP_S else unread_s

    def is_fresh(self) -> bool:
        """Whether the view was read within the time after which nodes count as unknown."""
        return time.monotonic() - self._view_at < self._settings.heartbeat_stale_s

    def missing(self) -> list[str]:
        """What the process lacks to serve requests: a view that is not stale, the catalog."""
        missing = [] if self._has_view and self._aged_s() < self._settings.heartbeat_stale_s else ["live view"]
        return missing if self._has_catalog else [*missing, "catalog"]

    def read_view(self) -> None:
        """Read the live view now, as `following()` does every `view_refresh_s`.

        Raises:
            UnavailableError: Redis is unavailable; a first view is then read from Postgres.
        """
        keep_s, at_s = self._settings.heartbeat_stale_s, time.monotonic()
        try:
            read = self._live.read_view()
            view = _merged(self._view, read, was_away=self._view_away, keep_s=keep_s)
        except UnavailableError:
            if not self._view.nodes:
                self._take_view(self._reads.read(lambda session: stored_view(session, heard_s=keep_s))[0], at_s)
            raise
        oldest_s = read.read_s - keep_s
        self._reporting = frozenset(name for name, node in read.nodes.items() if node.received_s >= oldest_s)
        self._take_view(view, at_s)

    def _take_view(self, view: FleetView, at_s: float) -> None:
        """Use a view whose reading began then."""
        reports = [(node, report) for node in view.nodes.values() for report in node.heartbeat.instances]
        self._reported_s = {each.instance_id: at_s - (view.read_s - node.received_s) for node, each in reports}
        self._view, self._view_at, self._has_view = view, at_s, True
        self._placed_s |= {report.model: at_s for _, report in reports if report.state != "failed"}

    async def _look_up(self) -> None:
        """Read the catalog again. Concurrent requests share one read."""
        now_s = time.monotonic()
        async with self._looking_up:
            if self._catalog_asked_s >= now_s:
                return
            await asyncio.sleep(self._catalog_asked_s + _LOOK_UP_EVERY_S - time.monotonic())
            await self._refresh_catalog()

    def _read_catalog(self) -> None:
        self._catalog_asked_s = time.monotonic()
        heard_s = self._settings.heartbeat_stale_s + self._settings.request_start_wait_s
        self._catalog, _ = self._reads.read(functools.partial(load_catalog, heard_s=heard_s))
        self._has_catalog = True

    async def _repeat(self, refresh: Callable[[bool], Awaitable[bool]], every_s: float, what: str) -> None:
        """Refresh every so often, where 0 is never; `refresh` is told whether the last time failed."""
        down = False
        while every_s:
            await asyncio.sleep(every_s)
            ok = await refresh(down)
            if ok and down:
                log.info("a source is available again", what=what)
            down = not ok

    async def _refresh_view(self, quiet: bool = False) -> bool:
        ok = await self._try(self.read_view, _VIEW, self._view_threads, quiet=quiet)
        self._view_away = not ok
        self._note_change()
        return ok

    async def _refresh_catalog(self, quiet: bool = False) -> bool:
        return await self._try(self._read_catalog, _CATALOG, self._catalog_threads, quiet=quiet)

    async def _exchange_sent(self, quiet: bool) -> bool:
        """While this process sends, tell the others what, and hear what they have sent. That counts unless it is heard
        late: then all who hear of it would act alike. It does not count for an instance that has reported since, nor
        while reports are not read. Its times are of Redis's clock, which may be set back.
        """
        if not (self._has_view and self._sent.is_busy(_SHARES_SENT_S)):
            return not quiet  # as it was
        began_s, ahead_s = time.monotonic(), self._view_at - self._view.read_s
        untold, told = self._sent.untold(), list[SentElsewhere]()

        def exchange() -> None:
            self._heard, told[:] = self._live.exchange_sent(
                self._process, untold, after=self._heard, now_s=began_s - ahead_s
            )

        ok = await self._try(exchange, _SENT, self._sent_threads, quiet=quiet)
        now_s, instances = time.monotonic(), set[str]()
        if self._view_away or now_s - began_s > _HEARD_SOON_S:
            return ok
        for each in told:
            sent_s = min(each.at_s + ahead_s, now_s)
            for instance_id, sums in each.instances.items():
                if sent_s > self._reported_s.get(instance_id, math.inf):
                    self._sent.add_elsewhere(instance_id, Sending(sent_s, sums))
                    instances.add(instance_id)
        self._show_sent(instances)
        return ok

    async def _try(self, use: Callable[[], None], what: str, threads: anyio.CapacityLimiter, *, quiet: bool) -> bool:
        """Use a source in a thread of its own, once at a time: others may all wait for a Postgres that hangs."""
        try:
            await anyio.to_thread.run_sync(use, limiter=threads)
        except (TidepoolError, SQLAlchemyError) as error:
            if not quiet:
                log.warning(
                    "a source is unavailable; its last copy is used", what=what, error=str(error).splitlines()[0]
                )
            return False
        return True


@functools.lru_cache(maxsize=1024)
def _cache_salt(owner: str, given: str) -> str:
    return hashlib.sha256(f"{len(owner)}:{owner}{given}".encode()).hexdigest()[:32] if owner or given else ""


def _merged(before: FleetView, now: FleetView, *, was_away: bool, keep_s: float) -> FleetView:
    """The newer view of each node. Redis may have lost nodes and received no heartbeats while it was unavailable: their
    age then starts at zero.
    """
    merged = dict(now.nodes)
    for name, node in before.nodes.items():
        received_s = now.read_s if was_away else node.received_s
        newer = name not in merged or merged[name].received_s < received_s
        if newer and now.read_s - received_s <= keep_s:
            merged[name] = msgspec.structs.replace(merged.get(name, node), received_s=received_s)
    return FleetView(read_s=now.read_s, nodes=merged)
