"""What a region's gateways know together of its shares of limits, by the clock of the region's Redis.

tidepool:limit-shares          hash    KIND:TENANT -> the share as JSON
tidepool:limit-demand          hash    KIND:TENANT -> what callers asked for since the region last asked for shares
tidepool:limit-shares:asking   string  the gateway that asks Postgres for the region's shares now
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from controlplane.policies.limit_shares import FLOOR_LEASE_S, AppliedShare
from controlplane.policies.limits import Limit
from controlplane.settings import Settings
from controlplane.store.redis.limits import answered, connect, running_key

_SHARES, _DEMAND, _ASKING = "tidepool:limit-shares", "tidepool:limit-demand", "tidepool:limit-shares:asking"
Shares = dict[str, dict[Limit, AppliedShare]]
"""By tenant and limit."""
Asked = dict[str, dict[Limit, float]]
"""What callers asked for, by tenant and limit."""

_PUT = """
for place = 1, #ARGV, 3 do
  local kept = redis.call('HGET', KEYS[1], ARGV[place])
  local version = kept and cjson.decode(kept).version or -1
  if version == tonumber(ARGV[place + 1]) then redis.call('HSET', KEYS[1], ARGV[place], ARGV[place + 2]) end
end
return 0
"""
_NONE = -1


@dataclass(frozen=True, kw_only=True)
class KnownShares:
    """The shares of a region, and the time by the clock that they go by."""

    shares: Shares
    now_s: float


class ShareStore:
    """Shares of one region. Every call raises UnavailableError soon while Redis is unavailable."""

    def __init__(self, settings: Settings) -> None:
        self._redis = connect(settings)
        self._put = self._redis.register_script(_PUT)
        self._every_s = settings.limit_share_every_s

    async def close(self) -> None:
        await self._redis.aclose()

    async def read(self) -> KnownShares:
        """The shares that the region applies; those that ended long ago are forgotten."""
        now_s = await self.now_s()
        kept: dict[str, str] = await answered(self._redis.hgetall(_SHARES))
        shares: Shares = {}
        old = []
        for name, text in kept.items():
            kind, _, tenant = name.partition(":")
            share = AppliedShare(**json.loads(text))
            if now_s < share.ends_s + FLOOR_LEASE_S:
                shares.setdefault(tenant, {})[Limit(kind)] = share
            else:
                old.append(name)
        if old:
            await answered(self._redis.hdel(_SHARES, *old))
        return KnownShares(shares=shares, now_s=now_s)

    async def now_s(self) -> float:
        """The time by Redis's clock."""
        seconds, micros = await answered(self._redis.time())
        return float(seconds) + float(micros) / 1e6

    async def put(self, shares: Shares, *, before: Shares) -> None:
        """Apply shares from now on, in place of those `before`; where another gateway was faster, its stay."""
        words: list[str | int] = []
        for tenant, kinds in shares.items():
            for kind, share in kinds.items():
                last = before.get(tenant, {}).get(kind)
                words += [f"{kind}:{tenant}", _NONE if last is None else last.version, json.dumps(asdict(share))]
        if words:
            await answered(self._put(keys=[_SHARES], args=words))

    async def add_demand(self, asked: Mapping[str, Mapping[Limit, float]]) -> None:
        """Add what this gateway's callers asked for."""
        calls = self._redis.pipeline(transaction=True)
        for tenant, kinds in asked.items():
            for kind, amount in kinds.items():
                calls.hincrbyfloat(_DEMAND, f"{kind}:{tenant}", amount)
        await answered(calls.execute())

    async def take_demand(self) -> Asked:
        """What the region's callers asked for since the last time."""
        calls = self._redis.pipeline(transaction=True)
        calls.hgetall(_DEMAND)
        calls.delete(_DEMAND)
        taken: dict[str, str] = (await answered(calls.execute()))[0]
        asked: Asked = {}
        for name, amount in taken.items():
            kind, _, tenant = name.partition(":")
            asked.setdefault(tenant, {})[Limit(kind)] = float(amount)
        return asked

    async def count_running(self, tenant: str) -> int:
        """Requests of a tenant that run in the region."""
        return int(await answered(self._redis.zcard(running_key(tenant))))

    async def may_ask(self, gateway: str) -> bool:
        """Whether it is this gateway's turn to ask for the region's shares."""
        taken: Any = self._redis.set(_ASKING, gateway, nx=True, px=int(self._every_s * 1000))
        return bool(await answered(taken))
