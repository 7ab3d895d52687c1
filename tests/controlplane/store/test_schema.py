"""What a process says of a database that was never migrated, is older, or is newer than it."""

import subprocess
import sys

import psycopg
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr, ValidationError
from sqlalchemy import make_url, text
from structlog.testing import capture_logs

import migrations
from controlplane.api.app import make_app
from controlplane.errors import SchemaError
from controlplane.settings import Settings
from controlplane.store.schema import check_schema, check_schema_at_start, too_old
from controlplane.store.session import Database, make_engine
from ops.local.ports import free_port

NEWEST, BEFORE, *_ = migrations.revisions()
RUN = "run `tidepool migrate`"


def _stamp(settings: Settings, statement: str) -> None:
    database = Database(make_engine(settings))
    with database.transaction() as session:
        session.execute(text(statement))
    database.close()


def _set(revision: str) -> str:
    return f"UPDATE alembic_version SET version_num = '{revision}'"


def test_revisions_are_the_newest_first() -> None:
    assert migrations.revisions()[-1] == "0001"
    assert too_old(NEWEST, migrations.revisions()) is None
    assert too_old("9999", migrations.revisions()) is None


def test_a_migrated_database_fits(settings: Settings) -> None:
    with capture_logs() as logs:
        check_schema_at_start(settings)
    assert logs == []


def test_a_database_of_another_encoding_is_refused_before_anything_is_written(settings: Settings) -> None:
    url = make_url(settings.database_url.get_secret_value())
    ascii_url = url.set(database="in_ascii").render_as_string(hide_password=False)
    with psycopg.connect(url.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True) as db:
        db.execute("CREATE DATABASE in_ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
        try:
            with pytest.raises(SchemaError, match="encoded as SQL_ASCII, Tidepool needs UTF8: make it"):
                migrations.upgrade(ascii_url)
        finally:
            db.execute("DROP DATABASE in_ascii")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (_set(BEFORE), f"the database has schema {BEFORE}, this version needs {NEWEST}: {RUN}"),
        ("DROP TABLE alembic_version", f"the database has no schema, this version needs {NEWEST}: {RUN}"),
    ],
)
def test_an_older_one_is_refused(settings: Settings, statement: str, message: str) -> None:
    _stamp(settings, statement)
    with pytest.raises(SchemaError) as refused:
        check_schema_at_start(settings)
    assert refused.value.message == message


def test_a_newer_one_is_served_and_said(settings: Settings) -> None:
    _stamp(settings, _set("9999"))
    with capture_logs() as logs:
        check_schema_at_start(settings)
    (said,) = logs
    assert said["event"] == "the database has a newer schema than this version"
    assert (said["schema"], said["version_needs"]) == ("9999", NEWEST)


def test_one_that_is_away_is_not_judged(settings: Settings) -> None:
    away = settings.model_copy(update={"database_url": SecretStr(f"postgresql+psycopg://127.0.0.1:{free_port()}/x")})
    with capture_logs() as logs:
        check_schema_at_start(away)
    assert [entry["event"] for entry in logs] == ["the database does not answer, so its schema is not known"]


def _environment(settings: Settings, url: str) -> dict[str, str]:
    return {
        "TIDEPOOL_DATABASE_URL": url,
        "TIDEPOOL_REDIS_URL": settings.redis_url.get_secret_value(),
        "TIDEPOOL_HOME": str(settings.home),
    }


@pytest.mark.parametrize("command", ["dispatcher", "worker", "forecaster", "beat"])
def test_each_process_ends_with_one_line(settings: Settings, command: str) -> None:
    _stamp(settings, _set(BEFORE))
    done = subprocess.run(
        [sys.executable, "-m", "ops.cli.main", command],
        env=_environment(settings, settings.database_url.get_secret_value()),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr == f"error: the database has schema {BEFORE}, this version needs {NEWEST}: {RUN}\n"


def test_a_gateway_is_not_ready_until_somebody_migrates(settings: Settings) -> None:
    _stamp(settings, "DROP SCHEMA public CASCADE")
    _stamp(settings, "CREATE SCHEMA public")
    url = settings.database_url.get_secret_value()
    with TestClient(make_app(settings), raise_server_exceptions=False) as api:
        answer = api.get("/readyz")
        assert answer.status_code == 503
        assert f"the database has no schema, this version needs {NEWEST}: {RUN}" in answer.json()["missing"]
        refused = api.get("/admin/regions", headers={"Authorization": "Bearer tp-admin-0123456789abcdef"})
        assert (refused.status_code, refused.json()["code"]) == (503, "schema_too_old")
        assert RUN in refused.json()["detail"]
        migrations.upgrade(url)
        assert not [fault for fault in api.get("/readyz").json()["missing"] if "schema" in fault]


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_each_spelling_of_an_address_works(settings: Settings, scheme: str) -> None:
    _, _, rest = settings.database_url.get_secret_value().partition("://")
    given = Settings(database_url=SecretStr(f"{scheme}://{rest}"))
    assert make_url(given.database_url.get_secret_value()).drivername == "postgresql+psycopg"
    database = Database(make_engine(given))
    check_schema(database)
    database.close()
    migrations.upgrade(f"{scheme}://{rest}")


@pytest.mark.parametrize("url", ["mysql://me:word@db/x", "db:5432", "postgresql+asyncpg://db/x"])
def test_another_address_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="must be postgresql://USER:PASSWORD@HOST:PORT") as refused:
        Settings(database_url=SecretStr(url))
    assert "word" not in str(refused.value)
