"""The settings of an installation as its commands find them: from the environment, else of the embedded servers."""

import os
from pathlib import Path

from pydantic import SecretStr

from controlplane.settings import Settings
from ops.client.home import read_secrets, remembered_port
from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey
from ops.local.postgres_cluster import PostgresCluster, region_home, regions_at


def given_settings(home: Path) -> Settings:
    """Settings of the environment. An address of a server that is set and empty counts as unset.

    Raises:
        pydantic.ValidationError: one is invalid.
        pydantic_settings.SettingsError: one is no JSON and must be.
    """
    return Settings(home=home, database_url=_address("database_url"), redis_url=_address("redis_url"))


def _address(name: str) -> SecretStr:
    default: SecretStr = Settings.model_fields[name].default
    return SecretStr(os.environ.get(f"TIDEPOOL_{name.upper()}") or default.get_secret_value())


def installed_settings(home: Path) -> Settings:
    """Settings whose servers are those that the environment names, or else the embedded ones of `tidepool up`; where
    those are of several regions, the cluster of Postgres and the first region's Valkey.

    Raises:
        EmbeddedError: the home's files cannot be read.
    """
    settings = given_settings(home)
    found: dict[str, SecretStr] = {}
    regions = regions_at(home)
    servers = region_home(home, regions[0]) if regions else home
    if not os.environ.get("TIDEPOOL_DATABASE_URL") and (port := remembered_port(servers, EmbeddedPostgres.name)):
        own = EmbeddedPostgres(servers, port)
        found["database_url"] = SecretStr(PostgresCluster(home, regions).url(regions[0]) if regions else own.url())
        if not settings.node_key.get_secret_value() and (secret := read_secrets(home).get("node")):
            found["node_key"] = SecretStr(secret)
    if not os.environ.get("TIDEPOOL_REDIS_URL") and (port := remembered_port(servers, EmbeddedValkey.name)):
        found["redis_url"] = SecretStr(EmbeddedValkey(servers, port).url())
    return settings.model_copy(update=found)
