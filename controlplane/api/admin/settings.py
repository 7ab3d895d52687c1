"""The settings in force in the gateway that answers, and where each comes from. No secret is ever shown."""

import os
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit, urlunsplit

from fastapi import APIRouter
from pydantic import BaseModel, Field, SecretStr, TypeAdapter

from controlplane.api.auth import Operator
from controlplane.api.state import StateDep
from controlplane.settings import Settings

router = APIRouter(tags=["admin: status"])
Source = Literal["default", "environment", "command line"]
_JSON = TypeAdapter(Any)


class Setting(BaseModel):
    """One setting of a process."""

    name: str = Field(description="the variable that sets it", examples=["TIDEPOOL_PORT"])
    value: Any = Field(
        description="null: unset. Of a secret whether it is set; of an address no user, password or query",
        examples=[8080],
    )
    default: Any = Field(examples=[8080])
    source: Source
    secret: bool
    about: str = Field(examples=["port that a gateway listens on; 0 for a free one"])


class SettingsInForce(BaseModel):
    """All settings of one gateway; other processes read their own environment."""

    data: list[Setting]


@router.get("/settings", summary="Settings in force")
def get_settings(state: StateDep, _: Operator) -> SettingsInForce:
    """In the order of the reference. A process reads its settings when it starts."""
    return SettingsInForce(data=settings_in_force(state.settings, os.environ))


def settings_in_force(settings: Settings, environment: Mapping[str, str]) -> list[Setting]:
    """What each setting is, and from where, with nothing in it that must not be read."""
    prefix = settings.model_config.get("env_prefix", "")
    given = {name.upper() for name in environment}
    found = []
    for name, field in Settings.model_fields.items():
        variable, value = f"{prefix}{name.upper()}", getattr(settings, name)
        source: Source = "environment" if variable in given else "command line"
        found.append(
            Setting(
                name=variable,
                value=_shown(value),
                default=_shown(field.get_default(call_default_factory=True, validated_data={})),
                source=source if name in settings.model_fields_set else "default",
                secret=isinstance(value, SecretStr),
                about=field.description or "",
            )
        )
    return found


def _shown(value: Any) -> Any:
    if isinstance(value, SecretStr):
        text = value.get_secret_value()
        return _address(text) if "://" in text else bool(text)
    plain = _JSON.dump_python(value, mode="json")
    return ",".join(map(_address, plain.split(","))) if isinstance(plain, str) and "://" in plain else plain


def _address(url: str) -> str:
    """Scheme, hosts, port and path: users, passwords and tokens stand before and after them."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2] or ",".join(parse_qs(parts.query).get("host", []))
    query = "…" if parts.query else ""
    return urlunsplit((parts.scheme, hosts, parts.path, query, ""))
