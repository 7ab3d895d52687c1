"""Addresses of Postgres in each of libpq's spellings, as SQLAlchemy and psycopg take them."""

from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict
from pydantic import SecretStr, ValidationError
from sqlalchemy import make_url
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from controlplane.database_address import libpq_url, psycopg_url
from controlplane.settings import Settings
from controlplane.store.session import connect_args

SECRET = "s3cr%2Ft"
TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=12)


def parameters(url: str) -> dict[str, Any]:
    """What SQLAlchemy gives to psycopg for an address."""
    _, found = PGDialect_psycopg().create_connect_args(make_url(url))
    return {name: str(value) for name, value in found.items()}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("postgres://me@db/tidepool", {"user": "me", "host": "db", "port": "5432", "dbname": "tidepool"}),
        ("postgresql://db:6000/x?sslmode=require", {"host": "db", "port": "6000", "dbname": "x", "sslmode": "require"}),
        ("postgresql:///x?host=/run/pg", {"host": "/run/pg", "port": "5432", "dbname": "x"}),
        (
            f"postgresql://me:{SECRET}@a:5432,b,[::1]:7/x",
            {"user": "me", "password": "s3cr/t", "host": "a,b,::1", "port": "5432,5432,7", "dbname": "x",
             "target_session_attrs": "read-write", "connect_timeout": "3"},
        ),
        (
            "postgresql+psycopg:///x?host=a,b&port=7&connect_timeout=9&target_session_attrs=any",
            {"host": "a,b", "port": "7,7", "dbname": "x", "target_session_attrs": "any", "connect_timeout": "9"},
        ),
    ],
)  # fmt: skip
def test_an_address_reaches_the_driver(address: str, expected: dict[str, str]) -> None:
    found = psycopg_url(address)
    assert parameters(found) == expected
    assert conninfo_to_dict(libpq_url(found)) == expected, "connections without SQLAlchemy reach the same"


@given(TEXT, TEXT, TEXT, st.lists(st.sampled_from(["a", "b.example", "10.0.0.1", "[fe80::1]"]), min_size=1, max_size=3))
def test_any_names_and_passwords_pass(user: str, password: str, option: str, hosts: list[str]) -> None:
    given = {"user": user, "password": password, "application_name": option}
    parts = {name: quote(value, safe="") for name, value in given.items()}
    address = f"postgresql://{parts['user']}:{parts['password']}@{','.join(hosts)}/x"
    found = psycopg_url(f"{address}?application_name={parts['application_name']}")
    for seen in (parameters(found), conninfo_to_dict(libpq_url(found))):
        assert {name: seen[name] for name in given} == given
        assert seen["host"] == ",".join(host.strip("[]") for host in hosts)
    assert psycopg_url(found) == found, "an address that was converted is one"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (f"mysql://me:{SECRET}@db/x", "must be postgresql://"),
        (f"postgresql://me:{SECRET}@a:1,b:x/d", "a port must be a number from 1 to 65535"),
        (f"postgresql://me:{SECRET}@a:0/d", "a port must be a number from 1 to 65535"),
        (f"postgresql://me:{SECRET}@a:1,b:70000/d", "a port must be a number from 1 to 65535"),
        (f"postgresql://me:{SECRET}@a:1,,b/d", "a host is empty"),
        (f"postgresql://me:{SECRET}@/d?host=a:1&host=b:1", "host may be given once"),
        (f"postgresql://me:{SECRET}@/d?host=a,b,c&port=1,2", "there are 3 hosts and 2 ports"),
        (f"postgresql://me:{SECRET}@db/d?colour=blue", "parameters after . must be libpq's"),
        (f"postgresql://me:{SECRET}%zz@db/d", "written as %XX"),
        (f"postgresql://me:{SECRET}@a,b/d?target_session_attrs=writer", "target_session_attrs must be one of any"),
    ],
)
def test_a_bad_address_is_refused_by_the_name_of_its_setting(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEPOOL_DATABASE_URL", address)
    with pytest.raises(ValidationError, match=message) as refused:
        Settings()
    assert refused.value.errors()[0]["loc"] == ("database_url",)
    assert "s3cr" not in str(refused.value)


def test_what_an_address_says_of_a_connection_holds() -> None:
    plain = connect_args(Settings(database_url=SecretStr("postgresql://db/x"), database_timeout_s=7))
    assert plain["connect_timeout"] == 7
    url = "postgresql://a,b/x?keepalives_idle=60&options=-c%20search_path%3Dtide"
    several = connect_args(Settings(database_url=SecretStr(url), database_timeout_s=7))
    assert not {"connect_timeout", "keepalives_idle"} & set(several), "the address gives them"
    assert several["options"] == "-c search_path=tide -c statement_timeout=7000 -c timezone=UTC"
    assert several["tcp_user_timeout"] == plain["tcp_user_timeout"]
