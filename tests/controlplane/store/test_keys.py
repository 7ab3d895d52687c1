"""API keys: only their hash is kept, and only good ones are found."""

from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from controlplane.errors import ConflictError, NotFoundError
from controlplane.store.keys import ApiKey, find_key, hash_secret, make_key, revoke_key, rotate_key, snapshot
from controlplane.store.rows import list_rows
from controlplane.store.session import Database
from controlplane.store.tables import Role


def test_a_secret_is_never_stored(database: Database) -> None:
    with database.transaction() as session:
        made = make_key(session, name="app", role=Role.CLIENT, tenant="acme")
        stored = str(session.execute(text("SELECT to_jsonb(api_keys) FROM api_keys")).scalar_one())
        assert made.secret not in stored
        assert hash_secret(made.secret) in stored
        assert made.secret.startswith(made.row.prefix)
        assert len(made.secret) - len(made.row.prefix) > 30
        assert "secret_hash" not in snapshot(made.row)
        other = make_key(session, name="app", role=Role.CLIENT, tenant="acme")
        assert other.secret != made.secret


def test_only_good_keys_are_found(database: Database) -> None:
    with database.transaction() as session:
        ends = {"none": None, "later": timedelta(hours=1), "past": -timedelta(seconds=1)}
        made = {n: make_key(session, name=n, role=Role.CLIENT, tenant="a", lasts=end) for n, end in ends.items()}
        found = {name: find_key(session, key.secret) is not None for name, key in made.items()}
        assert found == {"none": True, "later": True, "past": False}
        revoked, is_new = revoke_key(session, made["later"].row.id)
        at = revoked.revoked_at
        again, is_new_again = revoke_key(session, revoked.id)
        assert (again.revoked_at, is_new, is_new_again) == (at, True, False)
        assert find_key(session, made["later"].secret) is None
        assert find_key(session, made["none"].row.secret_hash) is None, "the hash is not the secret"
        assert find_key(session, "") is None
        assert len(list_rows(session, ApiKey, after=None, limit=10).rows) == 3, "revoked keys stay for the audit"
        with pytest.raises(NotFoundError):
            revoke_key(session, "key_unknown")


def test_the_last_admin_key_stays(database: Database) -> None:
    with database.transaction() as session:
        first, second = (make_key(session, name=n, role=Role.ADMIN, tenant="a").row.id for n in "ab")
        revoke_key(session, first)
        with pytest.raises(ConflictError):
            revoke_key(session, second)


def test_a_key_that_somebody_signs_in_with_gets_no_other_secret_meanwhile(database: Database) -> None:
    """The rotation would end the sessions of the secret that it replaces, and not see the one that begins."""
    with database.transaction() as session:
        made = make_key(session, name="boss", role=Role.ADMIN, tenant="acme")
        key_id = made.row.id

    def rotate() -> None:
        with database.transaction() as session:
            session.execute(text("SET LOCAL lock_timeout = '50ms'"))
            rotate_key(session, key_id, overlap_s=60)

    with database.transaction() as signing_in:
        assert find_key(signing_in, made.secret, lock=True) is not None
        with pytest.raises(OperationalError, match="lock timeout"):
            rotate()
    rotate()


def test_a_standby_finds_keys(database: Database) -> None:
    """It takes no locks of rows."""
    with database.transaction() as session:
        secret = make_key(session, name="app", role=Role.CLIENT, tenant="acme").secret
    with database.transaction() as session:
        session.execute(text("SET TRANSACTION READ ONLY"))
        assert find_key(session, secret) is not None
