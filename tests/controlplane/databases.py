"""Migrated databases for tests, used again: making one and dropping it costs more than most tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import uuid_utils
from psycopg import Connection
from sqlalchemy import URL, make_url

import migrations

_GROWTH_BYTES_MAX = 4 * 2**20
_STATE = """
SELECT md5(string_agg(concat_ws(' ', relname, attnum, attname, atttypid), ',' ORDER BY relname, attnum)),
  pg_database_size(current_database())
FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE relnamespace = 'public'::regnamespace
"""
_KEEP_FIRST_ROWS = """
CREATE SCHEMA first_rows;
DO $$ DECLARE name text; filled bool; BEGIN
  FOR name IN SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' LOOP
    EXECUTE format('SELECT EXISTS (SELECT FROM public.%I)', name) INTO filled;
    IF filled THEN EXECUTE format('CREATE TABLE first_rows.%1$I AS TABLE public.%1$I', name); END IF;
  END LOOP;
END $$
"""
_EMPTY = """
SET session_replication_role = replica;
DO $$ DECLARE name text; BEGIN
  FOR name IN SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' LOOP
    EXECUTE format('DELETE FROM public.%I', name);
  END LOOP;
  FOR name IN SELECT relname FROM pg_class WHERE relnamespace = 'first_rows'::regnamespace AND relkind = 'r' LOOP
    EXECUTE format('INSERT INTO public.%1$I SELECT * FROM first_rows.%1$I', name);
  END LOOP;
  FOR name IN SELECT sequencename FROM pg_sequences WHERE schemaname = 'public' AND last_value IS NOT NULL LOOP
    EXECUTE format('ALTER SEQUENCE public.%I RESTART', name);
  END LOOP;
END $$
"""
_DISCONNECT_OTHERS = """
SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


class Databases:
    """Databases of one server: each is lent to one test at a time and emptied when it comes back. One whose schema a
    test changed, or which grew by more than 4 MiB, is dropped instead.
    """

    def __init__(self, server_url: str) -> None:
        self._server = make_url(server_url)
        self._template = self._create()
        migrations.upgrade(_address(self._template))
        with _connected(self._template) as connection:
            connection.execute(_KEEP_FIRST_ROWS)
        with _connected(self._template) as connection:
            self._state = _state(connection)
        self._free: list[URL] = []

    def take(self) -> str:
        """The address of a migrated, empty database."""
        return _address(self._free.pop() if self._free else self.copy())

    def give_back(self, address: str) -> None:
        """Empty a database for the next test, or drop it."""
        url = make_url(address)
        with _connected(url) as connection:
            connection.execute(_DISCONNECT_OTHERS)
            schema, size_bytes = _state(connection)
            fit = schema == self._state[0] and size_bytes - self._state[1] <= _GROWTH_BYTES_MAX
            if fit:
                connection.execute(_EMPTY)
        if fit:
            self._free.append(url)
        else:
            self.drop(url)

    def copy(self) -> URL:
        """A database of its own, copied by file: quicker than through the WAL."""
        return self._create(f"TEMPLATE {self._template.database} STRATEGY file_copy")

    def drop(self, url: URL) -> None:
        """Drop a database, whoever is connected to it."""
        self._run(f"DROP DATABASE {url.database} WITH (FORCE)")

    def close(self) -> None:
        """Drop all databases."""
        for url in (*self._free, self._template):
            self.drop(url)

    def _create(self, how: str = "") -> URL:
        name = f"test_{uuid_utils.uuid7().hex}"
        self._run(f"CREATE DATABASE {name} {how}")
        return self._server.set(database=name)

    def _run(self, statement: str) -> None:
        with _connected(self._server) as connection:
            connection.execute(statement)


@contextmanager
def _connected(url: URL) -> Iterator[Connection]:
    with psycopg.connect(url.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True) as it:
        yield it


def _state(connection: Connection) -> tuple[str, int]:
    """A digest of the schema, and the size in bytes."""
    state = connection.execute(_STATE).fetchone()
    assert state is not None
    return state


def _address(url: URL) -> str:
    return url.render_as_string(hide_password=False)
