"""The time by which limits are counted in Redis, in a test's hands: on a slow machine nothing refills of itself."""

import pytest
import redis

from controlplane.settings import Settings
from controlplane.store.redis import limits

_CLOCK = "test:clock"


class RedisClock:
    """It stands still until it is moved. Scripts registered from here on go by it."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        self.redis = redis.Redis.from_url(settings.redis_url.get_secret_value(), decode_responses=True)
        self.redis.set(_CLOCK, 1_000_000_000)
        for name in ("_ADMIT", "_SETTLE", "_RENEW"):
            script: str = getattr(limits, name)
            assert "redis.call('TIME')" in script
            stopped = script.replace("redis.call('TIME')", f"{{redis.call('GET', '{_CLOCK}'), 0}}")
            monkeypatch.setattr(limits, name, stopped)

    def move(self, seconds: int) -> None:
        """Let so much time pass."""
        self.redis.incrby(_CLOCK, seconds)

    def leases(self, tenant: str) -> dict[str, float]:
        """When the leases of a tenant's running requests end, in seconds from now."""
        now_s = float(self.redis.get(_CLOCK) or 0)
        ends = self.redis.zrange(f"tidepool:limits:{{{tenant}}}:running", 0, -1, withscores=True)
        return {lease: end_s - now_s for lease, end_s in ends}

    def close(self) -> None:
        """Close the connection."""
        self.redis.close()
