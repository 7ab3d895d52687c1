"""Budgets of tokens: a gateway reserves a block of a tenant's budgets in Postgres, and its requests spend it without
asking anybody. A request takes the most that it may need, and returns the rest when it ends. While Postgres has no
primary, what is reserved is spent, and then requests are refused.

What a gateway reserved stays reserved if it is killed; it returns what it did not use when it ends, when a period ends,
and when the tenant asks for nothing.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

import anyio
import anyio.to_thread
import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.api.credentials import Caller
from controlplane.api.metrics import Metrics
from controlplane.errors import InsufficientQuotaError, UnavailableError
from controlplane.policies.token_budgets import Budget
from controlplane.serving.background import in_background
from controlplane.serving.fan_out import ChoiceStream, InFlightQuery
from controlplane.settings import Settings
from controlplane.store.session import Database
from controlplane.store.token_budgets import Block, reserve_block, return_block

log = structlog.get_logger()
_RETURN_EVERY_S = 15.0
_IDLE_S = 300.0
_AWAY_FOR_S = 1.0
"""How long a gateway does not ask a Postgres that did not answer."""
_REFUSED_FOR_S = 5.0
"""How long a gateway refuses by itself what a budget has too few tokens for; it may be raised meanwhile."""


@dataclass
class _Held:
    """What is left of a block. Times are of the monotonic clock."""

    left: int
    starts: Mapping[Budget, datetime]
    ends_s: float
    used_s: float


@dataclass(frozen=True, kw_only=True)
class _Refused:
    need: int
    budget: Budget
    until_s: float
    ends_s: float | None


@dataclass
class TokenBudgets:
    """The blocks of one gateway."""

    database: Database
    metrics: Metrics
    settings: Settings
    _held: dict[str, _Held] = field(default_factory=dict)
    _refused: dict[str, _Refused] = field(default_factory=dict)
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    _unused: list[tuple[str, _Held]] = field(default_factory=list)
    _threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(4))
    _away_until_s: float = 0.0

    async def spent(self, caller: Caller, in_flight: InFlightQuery, stream: ChoiceStream) -> ChoiceStream:
        """The events of a request that is paid from its tenant's budgets.

        The first `anext` raises InsufficientQuotaError, or UnavailableError where nothing can be reserved.
        """
        async with contextlib.aclosing(stream):
            tokens = in_flight.tokens_max
            held = await self.take(caller.tenant, tokens)
            try:
                async for arrived in stream:
                    yield arrived
            finally:
                held.left += tokens - in_flight.used_tokens
                if self._held.get(caller.tenant) is not held:  # the block was given back meanwhile
                    self._unused.append((caller.tenant, held))

    async def take(self, tenant: str, tokens: int) -> _Held:
        """Take tokens from the block of a tenant, or from one that is reserved now.

        Raises:
            InsufficientQuotaError: a budget has too few left.
            UnavailableError: the block is used up, and Postgres does not answer.
        """
        held = self._present(tenant)
        if held is None or held.left < tokens:
            async with self._locks.setdefault(tenant, asyncio.Lock()):
                held = self._present(tenant)
                while held is None or held.left < tokens:
                    held = await self._reserve(tenant, held, tokens)
                held.left -= tokens
                return held
        held.left -= tokens
        held.used_s = time.monotonic()
        return held

    def _present(self, tenant: str) -> _Held | None:
        """The block, unless a period of it has ended."""
        held = self._held.get(tenant)
        if held is not None and time.monotonic() >= held.ends_s:
            self._unused.append((tenant, self._held.pop(tenant)))
            return None
        return held

    async def _reserve(self, tenant: str, held: _Held | None, tokens: int) -> _Held:
        need = tokens - (0 if held is None else held.left)
        last, now_s = self._refused.get(tenant), time.monotonic()
        if last is not None and now_s < last.until_s and need >= last.need:
            raise _refusal(tenant, last, tokens)
        if now_s < self._away_until_s:  # those that waited for the one that asked need not wait themselves
            raise _away(tenant)
        try:
            block = await anyio.to_thread.run_sync(self._reserve_now, tenant, need, limiter=self._threads)
        except SQLAlchemyError as error:
            log.warning("no tokens were reserved", tenant=tenant, error=str(error).splitlines()[0])
            self._away_until_s = time.monotonic() + _AWAY_FOR_S
            raise _away(tenant) from None
        if block.refused is not None:
            ends_s = None if block.good_for_s is None else now_s + block.good_for_s
            self._refused[tenant] = _Refused(
                need=need, budget=block.refused, until_s=now_s + _REFUSED_FOR_S, ends_s=ends_s
            )
            self.metrics.budget_refusals.inc()
            raise _refusal(tenant, self._refused[tenant], tokens)
        self._refused.pop(tenant, None)
        return self._add(tenant, block, now_s)

    def _reserve_now(self, tenant: str, need: int) -> Block:
        with self.database.transaction() as session:
            return reserve_block(session, tenant, need, self.settings)

    def _add(self, tenant: str, block: Block, now_s: float) -> _Held:
        """Put a block to what is left of the last one, if both are of the same periods."""
        held = self._held.get(tenant)
        if held is None or held.starts != block.starts:
            if held is not None:
                self._unused.append((tenant, held))
            ends_s = math.inf if block.good_for_s is None else now_s + block.good_for_s
            held = self._held[tenant] = _Held(left=0, starts=block.starts, ends_s=ends_s, used_s=now_s)
        held.left += block.tokens
        held.used_s = now_s
        return held

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Return what is not used while the block runs, and all of it when it is left."""
        try:
            async with in_background(self._return_forever()):
                yield
        finally:
            await self.give_back(idle_s=-1.0)

    async def _return_forever(self) -> None:
        while True:
            await asyncio.sleep(_RETURN_EVERY_S)
            await self.give_back(idle_s=_IDLE_S)

    async def give_back(self, *, idle_s: float) -> None:
        """Return what is left of blocks whose period ended, and of those from which nothing was taken for so long. What
        cannot be returned stays reserved: it may have been returned, and a second time would overrun the budget.
        """
        now_s = time.monotonic()
        for tenant, held in list(self._held.items()):
            if now_s >= held.ends_s or now_s - held.used_s > idle_s:
                self._unused.append((tenant, self._held.pop(tenant)))
        while self._unused:
            tenant, held = self._unused.pop()
            tokens, held.left = held.left, 0
            try:
                if tokens > 0:
                    await anyio.to_thread.run_sync(self._return_now, tenant, held.starts, tokens, limiter=self._threads)
            except SQLAlchemyError as error:
                log.warning(
                    "unused tokens stay reserved", tenant=tenant, tokens=tokens, error=str(error).splitlines()[0]
                )

    def _return_now(self, tenant: str, starts: Mapping[Budget, datetime], tokens: int) -> None:
        with self.database.transaction() as session:
            return_block(session, tenant, starts, tokens)


def _away(tenant: str) -> UnavailableError:
    return UnavailableError(
        f"The tokens that were reserved of the budget of tenant '{tenant}' are used up, and no more can be reserved:"
        " the database does not answer."
    )


def _refusal(tenant: str, refused: _Refused, tokens: int) -> InsufficientQuotaError:
    rest = "" if refused.ends_s is None else " Its period ends at midnight UTC."
    if refused.budget is Budget.MONTH:
        rest = " Its period ends with the month, UTC."
    return InsufficientQuotaError(
        f"The budget of tenant '{tenant}' ({refused.budget}) has too few tokens left for a request that may take"
        f" {tokens}; with a lower max_tokens it takes fewer.{rest}",
        retry_after_s=None if refused.ends_s is None else max(1.0, refused.ends_s - time.monotonic()),
    )
