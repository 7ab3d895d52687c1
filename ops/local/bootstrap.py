"""The first keys of an installation: `admin`, `client` and `node`, kept in keys.json of the home folder.

The database stores their hashes. A key that was rotated or revoked is never restored from an old keys.json: a secret is
stored only if it is new, or if the database has no first keys.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.orm import Session

from controlplane.store.keys import find_key, has_key_named, make_key
from controlplane.store.tables import Role
from ops.client.home import make_home, read_secrets, write_secrets

ROLES = (Role.ADMIN, Role.CLIENT, Role.NODE)
TENANT = "default"


@dataclass(frozen=True, kw_only=True)
class FirstKeys:
    """The secrets by role. `fresh`: roles whose secret is new."""

    secrets: dict[str, str]
    fresh: frozenset[str]


def make_secrets(kept: dict[str, str]) -> FirstKeys:
    """The kept secrets, and new ones for the roles that have none."""
    fresh = frozenset(role.value for role in ROLES if not kept.get(role.value))
    made = {role: f"tp-{role}-{secrets.token_urlsafe(32)}" for role in fresh}
    return FirstKeys(secrets=kept | made, fresh=fresh)


def keep_secrets(home: Path) -> FirstKeys:
    """The secrets of keys.json, made at the first start.

    Raises:
        EmbeddedError: keys.json cannot be read, or this user may not write the home.
    """
    make_home(home)
    keys = make_secrets(read_secrets(home))
    if keys.fresh:
        write_secrets(home, keys.secrets)
    return keys


def is_bootstrapped(session: Session) -> bool:
    """Whether the database has ever had a first admin key."""
    return has_key_named(session, _name(Role.ADMIN))


def store_keys(session: Session, keys: FirstKeys) -> list[str]:
    """Store the first keys, once; returns a line for each secret that was rotated or revoked.

    Raises:
        SQLAlchemyError: the database is unavailable, or not migrated.
    """
    faults = []
    for role in ROLES:
        secret = keys.secrets[role.value]
        if find_key(session, secret) is not None:
            continue
        if role.value in keys.fresh or not has_key_named(session, _name(role)):
            make_key(session, name=_name(role), role=role, tenant=TENANT, secret=secret)
        else:
            faults.append(
                f"the key '{role.value}' of keys.json was rotated or revoked: write its new secret there,"
                " or remove it to get a new key"
            )
    return faults


def _name(role: Role) -> str:
    return f"bootstrap-{role.value}"
