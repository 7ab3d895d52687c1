"""Shares of tenants' limits, where each region counts in a Redis of its own: one gateway of the region at a time asks
Postgres for them, and all read them from the region's Redis every second.

While Postgres has no primary, shares stay until their leases end, and then their floors.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import structlog
import uuid_utils
from sqlalchemy.exc import SQLAlchemyError

from controlplane.api.metrics import Metrics
from controlplane.errors import UnavailableError
from controlplane.policies.limit_shares import ShareReport, apply_share
from controlplane.policies.limits import MINUTE_S, Limit, TenantLimits
from controlplane.serving.background import in_background
from controlplane.settings import Settings
from controlplane.store.limit_shares import Grants, Reports, grant_shares
from controlplane.store.redis.limit_shares import Asked, KnownShares, ShareStore
from controlplane.store.session import Database

log = structlog.get_logger()
_READ_EVERY_S = 1.0


@dataclass
class _Outage:
    """What is logged once while something fails, and once when it works again."""

    words: str
    lasts: bool = False

    def begin(self, error: Exception) -> None:
        if not self.lasts:
            log.warning(self.words, error=str(error).splitlines()[0])
        self.lasts = True

    def end(self) -> None:
        if self.lasts:
            log.info("shares of limits are up to date again")
        self.lasts = False


@dataclass
class RegionShares:
    """The shares of a gateway's region."""

    region: str
    store: ShareStore
    database: Database
    metrics: Metrics
    settings: Settings
    _gateway: str = field(default_factory=lambda: uuid_utils.uuid7().hex)
    _known: KnownShares = field(default_factory=lambda: KnownShares(shares={}, now_s=0.0))
    _ahead_s: float = 0.0
    """Seconds by which Redis's clock is ahead of this process's."""
    _asked: Asked = field(default_factory=dict)
    _asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(2))

    async def within(self, tenant: str, limits: TenantLimits, *, tokens: int) -> TenantLimits:
        """The limits of a tenant in this region; 0: it may use nothing of it now. The request counts as demand.

        Raises:
            UnavailableError: the region has no share of a limit, and cannot ask for one.
        """
        asked = self._asked.setdefault(tenant, {})
        for kind in limits.by_kind():
            asked[kind] = asked.get(kind, 0.0) + (tokens if kind is Limit.TOKENS else 1)
        if limits.by_kind().keys() - self._known.shares.get(tenant, {}).keys():
            await self._ask_first(tenant)
        now_s = time.monotonic() + self._ahead_s
        shares = self._known.shares.get(tenant, {})
        return limits.with_shares(
            {kind: shares[kind].usable(now_s) if kind in shares else 0 for kind in limits.by_kind()}
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read and renew the shares while the block runs."""
        try:
            async with (
                in_background(_repeat(self.read, _Outage("shares of limits are not read"), self.metrics)),
                in_background(_repeat(self.renew, _Outage("shares of limits are not renewed"), self.metrics)),
            ):
                yield
        finally:
            await self.store.close()

    async def renew(self) -> None:
        """Tell Redis what callers asked for, and ask Postgres if it is this gateway's turn."""
        asked, self._asked = self._asked, {}
        if asked:
            await self.store.add_demand(asked)
        if await self.store.may_ask(self._gateway):
            asked, known = await self.store.take_demand(), await self.store.read()
            unsettled = {
                tenant
                for tenant, kinds in known.shares.items()
                if not all(share.is_settled(known.now_s) for share in kinds.values())
            }
            await self._ask(asked.keys() | unsettled, asked)

    async def read(self) -> None:
        """Read the region's shares."""
        self._known = await self.store.read()
        self._ahead_s = self._known.now_s - time.monotonic()
        self.metrics.limit_shares.set(sum(map(len, self._known.shares.values())))

    async def _ask_first(self, tenant: str) -> None:
        """Ask for the shares of a tenant of which the region has none; concurrent requests ask once."""
        task = self._asking.get(tenant)
        if task is None:
            task = self._asking[tenant] = asyncio.create_task(self._ask({tenant}, {}))
            task.add_done_callback(lambda done: self._end(tenant, done))
        try:
            async with asyncio.timeout(self.settings.key_wait_s):
                await asyncio.shield(task)
        except (UnavailableError, SQLAlchemyError, TimeoutError):
            raise UnavailableError(
                f"region '{self.region}' has no share of the limits of tenant '{tenant}' yet, and cannot ask for one"
            ) from None

    def _end(self, tenant: str, done: asyncio.Task[None]) -> None:
        del self._asking[tenant]
        if not done.cancelled():
            done.exception()  # whoever waits is told; the task itself may have outlived all of them

    async def _ask(self, tenants: Collection[str], asked: Asked) -> None:
        if not tenants:
            return
        known, asked_s = await self.store.read(), await self.store.now_s()
        reports = {tenant: await self._reports(tenant, known, asked) for tenant in tenants}
        grants = await anyio.to_thread.run_sync(self._grant, reports, limiter=self._threads)
        now_s = await self.store.now_s()
        applied = {
            tenant: {
                kind: apply_share(
                    known.shares.get(tenant, {}).get(kind),
                    share,
                    asked_s=asked_s,
                    now_s=now_s,
                    lease_s=self.settings.limit_share_lease_s,
                )
                for kind, share in kinds.items()
            }
            for tenant, kinds in grants.items()
        }
        await self.store.put(applied, before=known.shares)
        await self.read()

    async def _reports(self, tenant: str, known: KnownShares, asked: Asked) -> dict[Limit, ShareReport]:
        reports = {}
        for kind in Limit:
            share = known.shares.get(tenant, {}).get(kind)
            applied = 0 if share is None else share.applied(known.now_s)
            if kind is Limit.RUNNING and share is not None:
                applied = max(applied, await self.store.count_running(tenant))
            demand = asked.get(tenant, {}).get(kind, 0.0) * MINUTE_S / self.settings.limit_share_every_s
            version = None if share is None else share.version
            reports[kind] = ShareReport(version=version, applied=applied, demand=demand)
        return reports

    def _grant(self, reports: Reports) -> Grants:
        with self.database.transaction() as session:
            return grant_shares(session, self.region, reports, self.settings)


async def _repeat(work: Callable[[], Awaitable[None]], outage: _Outage, metrics: Metrics) -> None:
    while True:
        try:
            await work()
        except (UnavailableError, SQLAlchemyError) as error:
            metrics.limit_share_failures.inc()
            outage.begin(error)
        else:
            outage.end()
        await asyncio.sleep(_READ_EVERY_S)
