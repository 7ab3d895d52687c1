"""Caches of the keys and the console sessions that a gateway has seen recently: most requests need no query to
authenticate.
"""

import asyncio
import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import anyio
import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from controlplane.errors import AuthenticationError, UnavailableError
from controlplane.policies.limits import TenantLimits
from controlplane.serving.background import in_background
from controlplane.serving.regional_reads import RegionalReads
from controlplane.settings import Settings
from controlplane.store.console import FoundSession, SessionSource, find_session
from controlplane.store.keys import ApiKey, KeyScope, find_with_tenant, hash_secret
from controlplane.store.redis.live import LiveStore
from controlplane.store.tables import Role
from controlplane.store.tenants import limits_of

_STALE_KEY_KEEP_S = 300.0
_KEYS_MAX = 10_000
_FOLLOW_EVERY_S = 1.0
_LOADS_MAX = 10
"""Concurrent look-ups of keys. They have their own threads, since each may wait for a Postgres that hangs."""


@dataclass(frozen=True, kw_only=True)
class SignedIn:
    """A person's session at the console, and when it ends. `subject`, `issuer`: the same in all sessions of the person.
    Times are Unix times.
    """

    id: str
    source: SessionSource
    subject: str
    issuer: str | None
    name: str
    began_s: float
    idle_ends_s: float
    ends_s: float


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The owner of a key, or a person with a session. `name` is for the audit. `key_id`: the session's id of a person
    without a key; `scopes`, `models`: None is all; `node`: the only node that a node's key may act for.
    """

    key_id: str
    name: str
    tenant: str
    role: Role
    scopes: frozenset[KeyScope] | None = None
    models: frozenset[str] | None = None
    node: str | None = None
    limits: TenantLimits = field(default_factory=TenantLimits)
    session: SignedIn | None = None


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What Postgres knew of a secret at `at_s`. No caller: the key is not valid. Times are of the monotonic clock."""

    caller: Caller | None
    at_s: float
    good_until_s: float = math.inf

    def is_good_for(self, keep_s: float) -> bool:
        """Whether it is younger than `keep_s`, and the key has not expired."""
        now_s = time.monotonic()
        return now_s - self.at_s < keep_s and now_s < self.good_until_s


class CallerCache(ABC):
    """Callers by the hash of their secret. A revoked secret stops working after a second, by way of Redis, or after
    `key_cache_s`; in a region with a standby of Postgres up to `replica_lag_max_s` later. While no primary answers, the
    standby's word counts for good secrets until it may be `key_revocation_max_age_s` old, and for others nobody's;
    where there is no standby, known secrets work for five minutes. Invalid ones stay invalid.
    """

    _refusal: ClassVar[str]

    def __init__(self, reads: RegionalReads, settings: Settings) -> None:
        self._reads = reads
        self._settings = settings
        self._good: dict[str, _Known] = {}
        self._bad: dict[str, _Known] = {}
        self._loading: dict[str, tuple[float, asyncio.Task[_Known]]] = {}
        self._load_threads = anyio.CapacityLimiter(_LOADS_MAX)

    async def find(self, secret: str) -> Caller:
        """The caller of a secret.

        Raises:
            AuthenticationError: the secret is unknown, revoked or expired.
            SQLAlchemyError, UnavailableError: nobody can say now.
        """
        hashed = hash_secret(secret)
        known = self._good.get(hashed) or self._bad.get(hashed)
        if known is None or not known.is_good_for(self._settings.key_cache_s):
            known = await self._ask(hashed, secret, known)
        if known.caller is None:
            raise AuthenticationError(self._refusal)
        return known.caller

    def knows_any(self) -> bool:
        """Whether some secret works without Postgres."""
        return any(known.is_good_for(_STALE_KEY_KEEP_S) for known in self._good.values())

    def forget(self, hashes: frozenset[str]) -> None:
        """Refuse these secrets from now on."""
        for hashed in hashes & self._good.keys():
            self._note(hashed, _Known(caller=None, at_s=time.monotonic()))

    def renew(self, hashed: str) -> None:
        """Read a secret again when it comes next."""
        self._good.pop(hashed, None)

    async def _ask(self, hashed: str, secret: str, last: _Known | None) -> _Known:
        """What Postgres knows, or, while it is unavailable or slow, what it knew last. Concurrent requests with one key
        share a query.
        """
        now_s = time.monotonic()
        if hashed not in self._loading:
            task = asyncio.create_task(self._load(hashed, secret, last))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # even without a waiting request
            self._loading[hashed] = (now_s, task)
        asked_s, loading = self._loading[hashed]
        may_reuse = last is not None and last.is_good_for(_STALE_KEY_KEEP_S)
        patience_s = max(0.0, asked_s + self._settings.key_wait_s - now_s)
        try:
            async with asyncio.timeout(patience_s if may_reuse else None):
                return await asyncio.shield(loading)
        except (SQLAlchemyError, UnavailableError, TimeoutError):
            if last is not None and last.is_good_for(_STALE_KEY_KEEP_S):
                return last
            raise

    async def _load(self, hashed: str, secret: str, last: _Known | None) -> _Known:
        try:
            known = await anyio.to_thread.run_sync(self._read, secret, last, limiter=self._load_threads)
        finally:
            del self._loading[hashed]
        self._note(hashed, known)
        return known

    def _note(self, hashed: str, known: _Known) -> None:
        kept, other = (self._bad, self._good) if known.caller is None else (self._good, self._bad)
        other.pop(hashed, None)
        if len(kept) >= _KEYS_MAX:
            kept.clear()  # invalid keys have a table of their own and evict no valid one
        kept[hashed] = known

    def _read(self, secret: str, last: _Known | None) -> _Known:
        """What the database knows. A standby may lag: only the primary refuses a secret, or accepts a refused one."""
        at_s = time.monotonic()
        age_max_s = self._settings.key_revocation_max_age_s
        refused = last is not None and last.caller is None
        (caller, good_for_s), age_s = self._reads.read(
            lambda session: self._look_up(session, secret),
            age_max_s=age_max_s,
            counts=lambda found: found[0] is not None and not refused,
        )
        return _Known(caller=caller, at_s=at_s, good_until_s=at_s + min(good_for_s, age_max_s - age_s))

    @abstractmethod
    def _look_up(self, session: Session, secret: str) -> tuple[Caller | None, float]:
        """The caller of a secret, and for how many seconds it is good still; None: it is not good."""


class KeyCache(CallerCache):
    """API keys."""

    _refusal = "Incorrect API key provided."

    def _look_up(self, session: Session, secret: str) -> tuple[Caller | None, float]:
        found = find_with_tenant(session, secret)
        if found is None:
            return None, math.inf
        row = found.row
        caller = Caller(
            key_id=row.id,
            name=row.name,
            tenant=row.tenant,
            role=Role(row.role),
            scopes=_scopes(row),
            models=_models(row),
            node=row.node,
            limits=limits_of(found.tenant, self._settings),
        )
        return caller, math.inf if found.good_for_s is None else found.good_for_s


class SessionCache(CallerCache):
    """Sessions of people at the console."""

    _refusal = "The session has ended. Sign in again."

    def _look_up(self, session: Session, secret: str) -> tuple[Caller | None, float]:
        found = find_session(session, secret, self._settings)
        if found is None:
            return None, math.inf
        good_for_s = (min(found.idle_ends_at, found.ends_at) - found.now).total_seconds()
        return caller_of_session(found, self._settings), good_for_s


def caller_of_session(found: FoundSession, settings: Settings) -> Caller:
    """The person of a session, with the rights of the key that it began with."""
    row, key = found.row, found.key
    signed_in = SignedIn(
        id=row.id,
        source=SessionSource(row.source),
        subject=row.subject,
        issuer=row.issuer,
        name=row.name,
        began_s=row.created_at.timestamp(),
        idle_ends_s=found.idle_ends_at.timestamp(),
        ends_s=found.ends_at.timestamp(),
    )
    return Caller(
        key_id=row.key_id or row.id,
        name=row.audit_name,
        tenant=row.tenant,
        role=Role(row.role),
        scopes=None if key is None else _scopes(key),
        models=None if key is None else _models(key),
        limits=limits_of(found.tenant, settings),
        session=signed_in,
    )


def _scopes(key: ApiKey) -> frozenset[KeyScope] | None:
    return None if key.scopes is None else frozenset(KeyScope(scope) for scope in key.scopes)


def _models(key: ApiKey) -> frozenset[str] | None:
    return None if key.models is None else frozenset(key.models)


@contextlib.asynccontextmanager
async def following_revocations(live: LiveStore, *caches: CallerCache) -> AsyncIterator[None]:
    """Read revocations from Redis every second while the block runs."""
    async with in_background(_follow(live, caches)):
        yield


async def _follow(live: LiveStore, caches: Sequence[CallerCache]) -> None:
    threads = anyio.CapacityLimiter(1)
    while True:
        with contextlib.suppress(UnavailableError):  # then secrets are read again after `key_cache_s`
            revoked = await anyio.to_thread.run_sync(live.read_revoked, limiter=threads)
            for cache in caches:
                cache.forget(revoked)
        await asyncio.sleep(_FOLLOW_EVERY_S)
