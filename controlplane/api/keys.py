"""Keys a gateway has seen lately, so that no request waits for Postgres to know its caller."""

import time
from dataclasses import dataclass

import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from controlplane.errors import AuthenticationError
from controlplane.settings import Settings
from controlplane.store.keys import find_key, hash_secret
from controlplane.store.session import Database
from controlplane.store.tables import Role

_STALE_KEY_KEEP_S = 300.0
_KEYS_MAX = 10_000


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who is asking."""

    key_id: str
    name: str
    tenant: str
    role: Role


class KeyCache:
    """Keys by the hash of their secret. A revoked key stops working after `key_cache_s`."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._keep_s = settings.key_cache_s
        self._found: dict[str, tuple[float, Caller]] = {}

    async def find(self, secret: str) -> Caller:
        """The caller of a secret.

        Raises:
            AuthenticationError: the key is unknown, revoked or expired.
        """
        hashed = hash_secret(secret)
        cached = self._found.get(hashed)
        if cached is not None and time.monotonic() - cached[0] < self._keep_s:
            return cached[1]
        try:
            caller = await anyio.to_thread.run_sync(self._load, secret)
        except SQLAlchemyError:
            if cached is not None and time.monotonic() - cached[0] < _STALE_KEY_KEEP_S:
                return cached[1]
            raise
        if caller is None:
            self._found.pop(hashed, None)
            raise AuthenticationError("Incorrect API key provided.")
        if len(self._found) >= _KEYS_MAX:
            self._found.clear()
        self._found[hashed] = (time.monotonic(), caller)
        return caller

    def _load(self, secret: str) -> Caller | None:
        with self._database.transaction() as session:
            row = find_key(session, secret)
            if row is None:
                return None
            return Caller(key_id=row.id, name=row.name, tenant=row.tenant, role=Role(row.role))
