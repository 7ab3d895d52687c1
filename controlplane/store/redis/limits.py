"""Usage of tenants' limits, counted in Redis for all gateways. Every admission is one script, by Redis's clock.

tidepool:limits:{<tenant>}:requests, :tokens   hash    level, at: a bucket; deleted when it is full
tidepool:limits:{<tenant>}:running             zset    lease -> end: running requests; leases expire unless renewed
tidepool:gateways                              zset    gateway -> end: they share limits while Redis is unavailable
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from controlplane.errors import UnavailableError
from controlplane.policies.limits import Admission, Bucket, Limit, TenantLimits, Usage
from controlplane.settings import Settings

_GATEWAYS = "tidepool:gateways"
_NONE = -1
_REFUSED = (None, Limit.REQUESTS, Limit.TOKENS, Limit.RUNNING)

_COMMON = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local function level_of(key, limit)
  local kept = redis.call('HMGET', key, 'level', 'at')
  if not kept[1] then return limit end
  return math.min(limit, kept[1] + math.max(0, now - kept[2]) * limit / 60)
end
local function keep(key, limit, level)
  redis.call('HSET', key, 'level', string.format('%.6f', level), 'at', string.format('%.6f', now))
  redis.call('EXPIRE', key, math.ceil((limit - level) * 60 / limit) + 60)
end
"""

_ADMIT = (
    _COMMON
    + """
local requests_max, tokens_max, running_max = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local tokens, lease, lease_s = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local requests, left, running, refused = 0, 0, 0, 0
if requests_max > 0 then requests = level_of(KEYS[1], requests_max) end
if tokens_max > 0 then left = level_of(KEYS[2], tokens_max) end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
running = redis.call('ZCARD', KEYS[3])
if requests_max > 0 and requests < 1 then refused = 1
elseif tokens_max > 0 and left < tokens then refused = 2
elseif running_max > 0 and running >= running_max then refused = 3 end
if refused == 0 then
  if requests_max > 0 then requests = requests - 1; keep(KEYS[1], requests_max, requests) end
  if tokens_max > 0 then left = left - tokens; keep(KEYS[2], tokens_max, left) end
  if running_max > 0 then
    redis.call('ZADD', KEYS[3], now + lease_s, lease)
    redis.call('EXPIRE', KEYS[3], math.ceil(lease_s) + 60)
  end
end
return {refused, string.format('%.6f', requests), string.format('%.6f', left), running, string.format('%.6f', now)}
"""
)

_SETTLE = (
    _COMMON
    + """
local tokens_max, back, lease = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
if tokens_max > 0 and back > 0 then -- the next admission refills, and knows the limit of then
  if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBYFLOAT', KEYS[1], 'level', back) end
elseif tokens_max > 0 and back < 0 then
  keep(KEYS[1], tokens_max, math.min(tokens_max, level_of(KEYS[1], tokens_max) + back))
end
redis.call('ZREM', KEYS[2], lease)
return 0
"""
)

_RENEW = (
    _COMMON
    + """
for place = 2, #ARGV do redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), ARGV[place]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('EXPIRE', KEYS[1], math.ceil(ARGV[1]) + 60)
return redis.call('ZCARD', KEYS[1])
"""
)


@dataclass(frozen=True, kw_only=True)
class Charge:
    """One admitted request: the tokens charged, and the lease that counts it as running."""

    tenant: str
    limits: TenantLimits
    tokens: int
    lease: str


def connect(settings: Settings) -> redis.asyncio.Redis:
    """A client that gives up soon: requests wait. A call is repeated where the connection was gone, but not where no
    answer came: a script that has run would charge, or refund, twice.
    """
    return redis.asyncio.Redis.from_url(
        settings.redis_url.get_secret_value(),
        decode_responses=True,
        socket_timeout=settings.limit_timeout_s,
        socket_connect_timeout=settings.limit_timeout_s,
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
    )


class LimitStore:
    """The counts of all gateways. Every call raises UnavailableError soon while Redis is unavailable: requests wait."""

    def __init__(self, settings: Settings) -> None:
        self._lease_s = settings.limit_lease_s
        self._redis = connect(settings)
        self._admit = self._redis.register_script(_ADMIT)
        self._settle = self._redis.register_script(_SETTLE)
        self._renew = self._redis.register_script(_RENEW)

    async def close(self) -> None:
        await self._redis.aclose()

    async def admit(self, charge: Charge) -> Admission:
        """Charge a request to its tenant, or refuse it and charge nothing."""
        limits = charge.limits
        refused, requests, tokens, running, at_s = await answered(
            self._admit(
                keys=[_key(charge.tenant, name) for name in ("requests", "tokens", "running")],
                args=[
                    _number(limits.requests_per_minute),
                    _number(limits.tokens_per_minute),
                    _number(limits.concurrent_max),
                    charge.tokens,
                    charge.lease,
                    self._lease_s,
                ],
            )
        )
        now_s = float(at_s)
        usage = Usage(
            requests=None if limits.requests_per_minute is None else Bucket(level=float(requests), at_s=now_s),
            tokens=None if limits.tokens_per_minute is None else Bucket(level=float(tokens), at_s=now_s),
            running=int(running),
        )
        return Admission(refused=_REFUSED[int(refused)], usage=usage)

    async def settle(self, charge: Charge, *, used_tokens: int) -> None:
        """End a request: correct its tokens by what it used, and end its lease."""
        await answered(
            self._settle(
                keys=[_key(charge.tenant, "tokens"), running_key(charge.tenant)],
                args=[_number(charge.limits.tokens_per_minute), charge.tokens - used_tokens, charge.lease],
            )
        )

    async def renew(self, leases: Mapping[str, Sequence[str]]) -> None:
        """Renew, or restore, the leases of running requests, by tenant."""
        for tenant, ids in leases.items():
            await answered(self._renew(keys=[running_key(tenant)], args=[self._lease_s, *ids]))

    async def drop(self, tenant: str, leases: Sequence[str]) -> None:
        await answered(self._redis.zrem(running_key(tenant), *leases))

    async def count_gateways(self, gateway: str) -> int:
        """Register a gateway; returns how many there are."""
        return int(await answered(self._renew(keys=[_GATEWAYS], args=[self._lease_s, gateway])))


def _key(tenant: str, name: str) -> str:
    return f"tidepool:limits:{{{tenant}}}:{name}"


def running_key(tenant: str) -> str:
    """The set of a tenant's running requests."""
    return _key(tenant, "running")


def _number(limit: int | None) -> int:
    return _NONE if limit is None else limit


async def answered(call: Awaitable[Any] | Any) -> Any:
    """What Redis answers.

    Raises:
        UnavailableError: it does not.
    """
    try:
        return await cast("Awaitable[Any]", call)
    except redis.RedisError as error:
        raise UnavailableError(f"Redis does not answer: {error}") from error
