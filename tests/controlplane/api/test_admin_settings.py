"""`/admin/settings`: what is in force, where it comes from, and that no secret is in it."""

from typing import Any

import pytest
from pydantic import SecretStr

from controlplane.api.admin.settings import settings_in_force
from controlplane.settings import Settings
from tests.controlplane.api.conftest import Ask

SECRET = "hunter2"


def values(settings: Settings, environment: dict[str, str]) -> dict[str, Any]:
    return {each.name: each for each in settings_in_force(settings, environment)}


def test_each_setting_says_where_it_comes_from(ask: Ask) -> None:
    listed = {each["name"]: each for each in ask("GET", "/admin/settings")["data"]}
    assert set(listed) == {f"TIDEPOOL_{name.upper()}" for name in Settings.model_fields}
    assert listed["TIDEPOOL_CONSOLE_IDLE_S"]["about"]
    ask("GET", "/admin/settings", role="viewer", status=403)


def test_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEPOOL_PORT", "9000")
    found = values(Settings(host="0.0.0.0"), {"TIDEPOOL_PORT": "9000"})
    assert (found["TIDEPOOL_PORT"].value, found["TIDEPOOL_PORT"].default) == (9000, 8080)
    assert found["TIDEPOOL_PORT"].source == "environment"
    assert found["TIDEPOOL_HOST"].source == "command line"
    assert found["TIDEPOOL_REGION"].source == "default"


def test_addresses_are_shown_without_users_passwords_and_queries() -> None:
    url = f"postgresql://ann:{SECRET}@db:5432/tidepool?sslpassword={SECRET}"
    shown = values(Settings(database_url=SecretStr(url)), {})["TIDEPOOL_DATABASE_URL"]
    assert shown.value == "postgresql+psycopg://db:5432/tidepool?…"
    assert shown.secret
    url = f"postgresql://ann:{SECRET}@a:5432,b:5433/tidepool"
    shown = values(Settings(database_url=SecretStr(url)), {})["TIDEPOOL_DATABASE_URL"]
    assert shown.value == "postgresql+psycopg://a,b/tidepool?…"


def test_no_setting_shows_a_secret() -> None:
    """Whatever secret a future version adds: all that are of this type are set, and every address carries one."""
    plain: dict[str, Any] = {
        "oidc_issuer": f"https://ann:{SECRET}@host/path",
        "oidc_client_id": "console",
        "oidc_roles": {"admin": ["sre"]},
        "trace_url": f"https://ann:{SECRET}@host/{{trace_id}}?token={SECRET}",
    }
    secrets: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        if isinstance(field.default, SecretStr):
            secrets[name] = SecretStr(f"redis://:{SECRET}@host/0" if name.endswith("_url") else SECRET)
    secrets["database_url"] = SecretStr(f"postgresql://ann:{SECRET}@db/tidepool")
    found = settings_in_force(Settings(**plain, **secrets), {})
    assert not [each.name for each in found if SECRET in each.model_dump_json()]
    assert {each.name for each in found if each.secret and each.value} == {f"TIDEPOOL_{n.upper()}" for n in secrets}
