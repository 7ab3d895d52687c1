"""Limits of tenants: every interactive request is charged before it is sent, and settled when it ends. Uploads and new
batches are charged as one request each, before their body is read.

While Redis is unavailable, each gateway admits its share of the limits; the log says so once, and a metric shows it.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import anyio
import structlog
import uuid_utils
from fastapi import Request

from controlplane.api.credentials import Caller
from controlplane.api.limit_shares import RegionShares
from controlplane.api.metrics import Metrics, Stage
from controlplane.api.token_budgets import TokenBudgets
from controlplane.errors import InvalidValueError, RateLimitError, UnavailableError
from controlplane.policies.limits import (
    Admission,
    Bucket,
    Limit,
    TenantLimits,
    Usage,
    choose_admission,
    retry_after_s,
    until_full_s,
)
from controlplane.serving.background import in_background
from controlplane.serving.fan_out import ChoiceStream, InFlightQuery
from controlplane.settings import Settings
from controlplane.store.redis.limits import Charge, LimitStore

log = structlog.get_logger()
_AWAY_RETRY_S = 1.0
_RETRY_AFTER_MIN_S = 0.1
_LOCAL_MAX = 10_000
"""Tenants, and addresses that sign in, whose usage a gateway counts by itself; then it begins anew."""
_UNITS = {Limit.REQUESTS: "requests per minute", Limit.TOKENS: "tokens per minute", Limit.RUNNING: "requests at once"}


@dataclass
class LimitKeeper:
    """Charges requests of one gateway; `running` renews their leases while they last."""

    store: LimitStore
    metrics: Metrics
    settings: Settings
    budgets: TokenBudgets
    shares: RegionShares | None = None
    _gateway: str = field(default_factory=lambda: uuid_utils.uuid7().hex)
    _gateways: int = 1
    _charges: dict[str, Charge] = field(default_factory=dict)
    _local: dict[str, Usage] = field(default_factory=dict)
    _away_until_s: float = 0.0
    _is_away: bool = False

    def limited(self, request: Request, in_flight: InFlightQuery, stream: ChoiceStream) -> ChoiceStream:
        """The events of a request within its tenant's limits; `x-ratelimit-*` go into the answer's headers.

        The first `anext` raises RateLimitError, InvalidValueError for a request larger than a minute's tokens, or
        InsufficientQuotaError.
        """
        caller: Caller = request.state.caller
        if caller.limits.budgets():
            stream = self.budgets.spent(caller, in_flight, stream)
        if not caller.limits.meter_interactive():
            return stream
        return self._metered(request, caller, in_flight, stream)

    @contextlib.asynccontextmanager
    async def one_request(self, request: Request, model: str) -> AsyncIterator[None]:
        """Charge a request that takes no tokens to its tenant's limits while the block runs; `x-ratelimit-*` go into
        the answer's headers.

        Raises:
            RateLimitError: a limit is reached.
        """
        caller: Caller = request.state.caller
        if not caller.limits.meter_interactive():
            yield
            return
        charge = await self._charge(caller, 0)
        await self._admit_or_refuse(request, charge, model)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._settle(charge, 0)

    async def one_write(self, request: Request, caller: Caller) -> None:
        """Charge an upload or a new batch to its tenant's requests per minute; `x-ratelimit-*` go into the answer's
        headers. Its other limits are of requests that models answer.

        Raises:
            RateLimitError: the limit is reached.
        """
        per_minute = caller.limits.requests_per_minute
        if per_minute is None:
            return
        charge = await self._charge(replace(caller, limits=TenantLimits(requests_per_minute=per_minute)), 0)
        await self._admit_or_refuse(request, charge)
        del self._charges[charge.lease]  # it has no tokens to return and no lease to renew

    async def attempt(self, what: str, per_minute: int) -> None:
        """Count an attempt at something that may be tried `per_minute`. `what` is no tenant's name.

        Raises:
            RateLimitError: it was tried too often.
        """
        limits = TenantLimits(requests_per_minute=per_minute)
        charge = Charge(tenant=what, limits=limits, tokens=0, lease=f"{self._gateway}.{uuid_utils.uuid7().hex}")
        limits, admission, _ = await self._admit(charge)
        if admission.refused is not None:
            wait_s = max(_RETRY_AFTER_MIN_S, retry_after_s(admission.refused, admission.usage, 0, limits))
            raise RateLimitError(
                f"Too many attempts ({what}): {per_minute} a minute are allowed. Try again in {math.ceil(wait_s)} s.",
                retry_after_s=wait_s,
            )
        del self._charges[charge.lease]  # it has no tokens to return and no lease to renew

    async def _metered(
        self, request: Request, caller: Caller, in_flight: InFlightQuery, stream: ChoiceStream
    ) -> ChoiceStream:
        async with contextlib.aclosing(stream):
            _refuse_too_large(caller, in_flight.tokens)
            charge = await self._charge(caller, in_flight.tokens)
            try:
                shared = await self._admit_or_refuse(request, charge, in_flight.query.model, in_flight.input_tokens)
            finally:
                request.state.stages.end(Stage.LIMITS)
            try:
                async for arrived in stream:
                    yield arrived
            finally:
                with anyio.CancelScope(shield=True):
                    await self._settle(charge, in_flight.used_tokens if shared else charge.tokens)

    async def _admit_or_refuse(
        self, request: Request, charge: Charge, model: str | None = None, input_tokens: int = 0
    ) -> bool:
        """Whether the charge was counted for all gateways; `x-ratelimit-*` go into the answer's headers.

        Raises:
            RateLimitError: a limit is reached; nothing is charged.
        """
        limits, admission, shared = await self._admit(charge)
        request.state.answer_headers = _headers(admission.usage, limits)
        if admission.refused is not None:
            self.metrics.note_limit_refusal(admission.refused, model=model, input_tokens=input_tokens)
            raise self._refusal(charge, limits, admission)
        return shared

    async def _charge(self, caller: Caller, tokens: int) -> Charge:
        """The charge of a request. One larger than its region's share takes all of it, and the rest when it ends."""
        limits = caller.limits
        if self.shares is not None:
            limits = await self.shares.within(caller.tenant, limits, tokens=tokens)
            tokens = tokens if limits.tokens_per_minute is None else min(tokens, limits.tokens_per_minute)
        lease = f"{self._gateway}.{uuid_utils.uuid7().hex}"
        return Charge(tenant=caller.tenant, limits=limits, tokens=tokens, lease=lease)

    def _refusal(self, charge: Charge, limits: TenantLimits, admission: Admission) -> RateLimitError:
        assert admission.refused is not None
        wait_s = max(_RETRY_AFTER_MIN_S, retry_after_s(admission.refused, admission.usage, charge.tokens, limits))
        most, where = limits.by_kind()[admission.refused], ""
        if self.shares is not None:
            where = f" (the share of region '{self.shares.region}' now)"
        return RateLimitError(
            f"The limit of tenant '{charge.tenant}' is reached: {most} {_UNITS[admission.refused]}{where}."
            f" Try again in {math.ceil(wait_s)} s.",
            retry_after_s=wait_s,
        )

    async def _admit(self, charge: Charge) -> tuple[TenantLimits, Admission, bool]:
        """The decision, its limits, and whether these are the tenant's, counted for all gateways; else they are this
        gateway's share.

        The charge is registered before Redis is called, and settled if the call is cancelled: otherwise its lease would
        be renewed for ever. Whether it was charged is unknown then, so no tokens are returned.
        """
        self._charges[charge.lease] = charge
        try:
            limits, admission, shared = await self._ask(charge)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._settle(charge, charge.tokens)
            raise
        if admission.refused is not None:
            del self._charges[charge.lease]
        return limits, admission, shared

    async def _ask(self, charge: Charge) -> tuple[TenantLimits, Admission, bool]:
        if nothing := [kind for kind, limit in charge.limits.by_kind().items() if limit == 0]:
            return charge.limits, Admission(refused=nothing[0], usage=Usage()), True
        if time.monotonic() >= self._away_until_s:
            try:
                admission = await self.store.admit(charge)
            except UnavailableError as error:
                self._note_away(error)
            else:
                self._note_back()
                return charge.limits, admission, True
        limits = charge.limits.share(self._gateways)
        return limits, self._admit_here(charge, limits), False

    def _admit_here(self, charge: Charge, limits: TenantLimits) -> Admission:
        """The decision by this gateway's own count. A request larger than the share takes all of it."""
        running = sum(other.tenant == charge.tenant for other in self._charges.values()) - 1
        usage = replace(self._local.get(charge.tenant, Usage()), running=running)
        tokens = min(charge.tokens, limits.tokens_per_minute or charge.tokens)
        admission = choose_admission(usage, tokens, limits, time.monotonic())
        if len(self._local) >= _LOCAL_MAX and charge.tenant not in self._local:
            self._local.clear()
        self._local[charge.tenant] = admission.usage
        return admission

    async def _settle(self, charge: Charge, used_tokens: int) -> None:
        del self._charges[charge.lease]
        if time.monotonic() < self._away_until_s:
            return  # the lease expires, and buckets refill within a minute
        try:
            await self.store.settle(charge, used_tokens=used_tokens)
        except UnavailableError as error:
            self._note_away(error)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renew leases, three times within their duration, while the block runs."""
        try:
            following = contextlib.nullcontext() if self.shares is None else self.shares.running()
            async with in_background(self._renew_forever()), following, self.budgets.running():
                yield
        finally:
            await self.store.close()

    async def _renew_forever(self) -> None:
        while True:
            try:
                await self._renew()
            except UnavailableError as error:
                self._note_away(error)
            else:
                self._note_back()
            await asyncio.sleep(_AWAY_RETRY_S if self._is_away else self.settings.limit_lease_s / 3)

    async def _renew(self) -> None:
        self._gateways = max(1, await self.store.count_gateways(self._gateway))
        leases: dict[str, list[str]] = {}
        for lease, charge in self._charges.items():
            if charge.limits.concurrent_max is not None:
                leases.setdefault(charge.tenant, []).append(lease)
        await self.store.renew(leases)
        for tenant, renewed in leases.items():  # the renewal may have restored what ended meanwhile
            if ended := [lease for lease in renewed if lease not in self._charges]:
                await self.store.drop(tenant, ended)

    def _note_away(self, error: UnavailableError) -> None:
        self._away_until_s = time.monotonic() + _AWAY_RETRY_S
        if not self._is_away:
            log.warning("limits are counted by each gateway alone", gateways=self._gateways, error=error.message)
        self._is_away = True
        self.metrics.limits_local.set(1)

    def _note_back(self) -> None:
        if self._is_away:
            log.info("limits are counted across gateways again")
        self._is_away = False
        self._away_until_s = 0.0
        self._local.clear()
        self.metrics.limits_local.set(0)


def _refuse_too_large(caller: Caller, tokens: int) -> None:
    most = caller.limits.tokens_per_minute
    if most is not None and tokens > most:
        raise InvalidValueError(
            f"max_tokens: prompt and answer may take {tokens} tokens, and the limit of tenant '{caller.tenant}'"
            f" is {most} a minute",
            param="max_tokens",
        )


def _headers(usage: Usage, limits: TenantLimits) -> list[tuple[bytes, bytes]]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, where there is such a limit."""
    counted = (
        (b"requests", limits.requests_per_minute, usage.requests),
        (b"tokens", limits.tokens_per_minute, usage.tokens),
    )
    return [pair for name, most, bucket in counted if most and bucket for pair in _described(name, most, bucket)]


def _described(name: bytes, most: int, bucket: Bucket) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-ratelimit-limit-" + name, b"%d" % most),
        (b"x-ratelimit-remaining-" + name, b"%d" % max(0, int(bucket.level))),
        (b"x-ratelimit-reset-" + name, b"%.3fs" % until_full_s(bucket, most)),
    ]
