"""Sessions of people at the console, and what leads to one: sign-in links, and sign-ins at an OpenID provider that have
not come back yet. Secrets are in browsers; here are only their SHA-256.

A session that began with a key has the key's rights and ends with the key. `seen_at` moves only when the person did
something, so that an open page that reads by itself does not keep a session alive.
"""

import secrets
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import uuid_utils
from sqlalchemy import (
    CheckConstraint,
    ColumnElement,
    ForeignKey,
    ScalarSelect,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.settings import Settings
from controlplane.store.keys import ApiKey, hash_secret, is_good, replaced_secret_ends_at
from controlplane.store.tables import Base, Role, one_of
from controlplane.store.tenants import Tenant

EndsBy = ScalarSelect[datetime | None] | datetime | None
_LINK_LASTS = timedelta(minutes=10)


class SessionSource(StrEnum):
    """How a person signed in."""

    KEY = "key"
    LINK = "link"
    OIDC = "oidc"


class ConsoleSession(Base):
    """A person's session in one browser. `subject`: the same in all sessions of one person: the key's id, or what the
    OpenID provider `issuer` calls the person. `id_token`: what that provider wants to see when the person logs out.
    """

    __tablename__ = "console_sessions"
    __table_args__ = (
        one_of("source", SessionSource),
        CheckConstraint("role IN ('viewer', 'operator', 'admin')", name="role_of_people"),
        CheckConstraint("source = 'oidc' OR key_id IS NOT NULL", name="key_then"),
        CheckConstraint("(source = 'oidc') = (issuer IS NOT NULL)", name="issuer_then"),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    secret_hash: Mapped[str] = mapped_column(unique=True)
    source: Mapped[str]
    subject: Mapped[str] = mapped_column(index=True)
    name: Mapped[str]
    role: Mapped[str]
    tenant: Mapped[str]
    key_id: Mapped[str | None] = mapped_column(ForeignKey("api_keys.id"), index=True)
    issuer: Mapped[str | None]
    id_token: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ends_at: Mapped[datetime] = mapped_column(index=True)
    ended_at: Mapped[datetime | None]

    @property
    def audit_name(self) -> str:
        """What the audit calls the person: the key's name, or `oidc:` and the person's, as no key's name begins."""
        return self.name if self.issuer is None else f"oidc:{self.name}"


class ConsoleLink(Base):
    """A link that signs in once, with the rights of the key that made it."""

    __tablename__ = "console_links"
    secret_hash: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    ends_at: Mapped[datetime] = mapped_column(index=True)
    used_at: Mapped[datetime | None]


class ConsoleFlow(Base):
    """A browser that was sent to the OpenID provider and has not come back. `secret_hash`: of its cookie; `place`: the
    page of the console that it goes to then.
    """

    __tablename__ = "console_flows"
    secret_hash: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    nonce: Mapped[str]
    verifier: Mapped[str]
    place: Mapped[str]
    ends_at: Mapped[datetime] = mapped_column(index=True)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who signs in, how, and with which rights."""

    source: SessionSource
    subject: str
    name: str
    role: Role
    tenant: str
    key_id: str | None = None
    issuer: str | None = None
    id_token: str | None = None


def identity_of(key: ApiKey, source: SessionSource) -> Identity:
    """The identity of who signs in by a key."""
    return Identity(source=source, subject=key.id, name=key.name, role=Role(key.role), tenant=key.tenant, key_id=key.id)


@dataclass(frozen=True, kw_only=True)
class NewSession:
    """A session just begun; `secret` is not to be had again."""

    row: ConsoleSession
    secret: str


@dataclass(frozen=True, kw_only=True)
class NewLink:
    """A link just made; `secret` is not to be had again."""

    secret: str
    ends_at: datetime


@dataclass(frozen=True, kw_only=True)
class UsedLink:
    """A link just used up: the key that made it, and when the session that begins with it ends at the latest (None:
    nothing of the link ends it).
    """

    key: ApiKey
    session_ends_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class FoundSession:
    """A session that is good at `now`, the key that it began with, if it was one, and the row of its tenant, if it has
    one.
    """

    row: ConsoleSession
    key: ApiKey | None
    tenant: Tenant | None
    now: datetime
    idle_ends_at: datetime
    ends_at: datetime


def begin_session(session: Session, identity: Identity, settings: Settings, *, ends_by: EndsBy = None) -> NewSession:
    """Begin a session. `ends_by`: when it ends at the latest, if that is known."""
    secret = secrets.token_urlsafe(32)
    ends_at = func.now() + timedelta(seconds=settings.console_session_s)
    row = ConsoleSession(
        id=f"ses_{uuid_utils.uuid7().hex}",
        secret_hash=hash_secret(secret),
        ends_at=func.least(ends_at, ends_by),
        **asdict(identity),
    )
    session.add(row)
    session.flush()
    return NewSession(row=row, secret=secret)


def find_session(session: Session, secret: str, settings: Settings) -> FoundSession | None:
    """The session of this secret if it has not ended, was used within the idle limit, and its key is good."""
    idle = timedelta(seconds=settings.console_idle_s)
    found = session.execute(
        select(ConsoleSession, ApiKey, Tenant, func.now())
        .outerjoin(ApiKey, ApiKey.id == ConsoleSession.key_id)
        .outerjoin(Tenant, Tenant.name == ConsoleSession.tenant)
        .where(ConsoleSession.secret_hash == hash_secret(secret), *_open(), ConsoleSession.seen_at + idle > func.now())
        .where(or_(ConsoleSession.key_id.is_(None), and_(*is_good())))
    ).one_or_none()
    if found is None:
        return None
    row, key, tenant, now = found
    ends_at = row.ends_at if key is None or key.expires_at is None else min(row.ends_at, key.expires_at)
    return FoundSession(row=row, key=key, tenant=tenant, now=now, idle_ends_at=row.seen_at + idle, ends_at=ends_at)


def note_seen(session: Session, session_id: str) -> None:
    """The person did something: the idle limit counts from now."""
    session.execute(update(ConsoleSession).where(ConsoleSession.id == session_id, *_open()).values(seen_at=func.now()))


def end_session(session: Session, secret: str) -> frozenset[str]:
    """End the session of this secret, if it is open; returns the hashes of ended secrets."""
    return _end(session, ConsoleSession.secret_hash == hash_secret(secret))


def end_sessions_of(session: Session, *, subject: str, issuer: str | None) -> frozenset[str]:
    """End all sessions of a person, and unused links to more; returns the hashes of the sessions' secrets."""
    if issuer is None:
        end_links(session, subject)
    is_person = and_(ConsoleSession.subject == subject, ConsoleSession.issuer.is_not_distinct_from(issuer))
    return _end(session, is_person)


def end_sessions_of_key(session: Session, key_id: str, *, after_s: int = 0) -> frozenset[str]:
    """End all sessions that began with a key, or let them end in `after_s`; returns the hashes of ended secrets."""
    of_key = ConsoleSession.key_id == key_id
    if not after_s:
        return _end(session, of_key)
    ends_at = func.least(ConsoleSession.ends_at, func.now() + timedelta(seconds=after_s))
    session.execute(update(ConsoleSession).where(of_key, *_open()).values(ends_at=ends_at))
    return frozenset()


def make_link(session: Session, key_id: str, *, key_secret: str | None) -> NewLink:
    """Make a link that signs in once, with the rights of a key, and ends with the secret of it that was given if that
    was replaced.
    """
    secret = secrets.token_urlsafe(32)
    ends_at = func.least(func.now() + _LINK_LASTS, replaced_secret_ends_at(key_secret))
    row = ConsoleLink(secret_hash=hash_secret(secret), key_id=key_id, ends_at=ends_at)
    session.add(row)
    session.flush()
    return NewLink(secret=secret, ends_at=row.ends_at)


def end_links(session: Session, key_id: str, *, after_s: int = 0) -> None:
    """Let the links that a key made end in `after_s` at the latest. Those of a revoked key sign in nobody anyway."""
    ends_at = func.least(ConsoleLink.ends_at, func.now() + timedelta(seconds=after_s))
    session.execute(update(ConsoleLink).where(ConsoleLink.key_id == key_id).values(ends_at=ends_at))


def use_link(session: Session, secret: str) -> UsedLink | None:
    """Use a link up. None: it was used or is too old, or its key is not good.

    A link that a replaced secret made ends with that secret at the latest, and so does its session. A link of the new
    secret that ends before the replaced one does cannot be told from it, and is treated alike.
    """
    good = (ConsoleLink.secret_hash == hash_secret(secret), ConsoleLink.used_at.is_(None))
    used = update(ConsoleLink).where(*good, ConsoleLink.ends_at > func.now()).values(used_at=func.now())
    row = session.execute(used.returning(ConsoleLink.key_id, ConsoleLink.ends_at)).one_or_none()
    key = None if row is None else session.scalar(select(ApiKey).where(ApiKey.id == row.key_id, *is_good()))
    if row is None or key is None:
        return None
    ends_with_old = key.old_until is not None and row.ends_at <= key.old_until
    return UsedLink(key=key, session_ends_at=key.old_until if ends_with_old else None)


def keep_flow(
    session: Session, secret: str, *, state: str, nonce: str, verifier: str, place: str, lasts_s: int
) -> None:
    """Remember that a browser with this secret was sent to the provider."""
    ends_at = func.now() + timedelta(seconds=lasts_s)
    session.execute(
        insert(ConsoleFlow).values(
            secret_hash=hash_secret(secret), state=state, nonce=nonce, verifier=verifier, place=place, ends_at=ends_at
        )
    )


def take_flow(session: Session, secret: str, *, state: str) -> ConsoleFlow | None:
    """What a browser that comes back began; it is there once. None: this browser began nothing with this state."""
    begun = (ConsoleFlow.secret_hash == hash_secret(secret), ConsoleFlow.state == state)
    taken = delete(ConsoleFlow).where(*begun, ConsoleFlow.ends_at > func.now()).returning(ConsoleFlow)
    return session.scalar(taken)


def id_token_of(session: Session, session_id: str) -> str | None:
    """The token by which the provider knows a session; None: it has none."""
    return session.scalar(select(ConsoleSession.id_token).where(ConsoleSession.id == session_id))


def _end(session: Session, which: ColumnElement[bool]) -> frozenset[str]:
    ended = update(ConsoleSession).where(which, *_open()).values(ended_at=func.now(), id_token=None)
    return frozenset(session.scalars(ended.returning(ConsoleSession.secret_hash)))


def _open() -> tuple[ColumnElement[bool], ...]:
    return ConsoleSession.ended_at.is_(None), ConsoleSession.ends_at > func.now()
