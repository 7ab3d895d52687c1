"""The settings of an installation as its commands find them: from the environment, else of the embedded servers."""

import os
from pathlib import Path

from pydantic import SecretStr

from controlplane.settings import Settings
from ops.client.home import read_secrets, remembered_port
from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey


def installed_settings(home: Path) -> Settings:
    """Settings whose servers are those that the environment names, or else the embedded ones of `tidepool up`.

    Raises:
        EmbeddedError: the home's files cannot be read.
    """
    settings = Settings(home=home)
    found: dict[str, SecretStr] = {}
    if not os.environ.get("TIDEPOOL_DATABASE_URL") and (port := remembered_port(home, EmbeddedPostgres.name)):
        found["database_url"] = SecretStr(EmbeddedPostgres(home, port).url())
        if not settings.node_key.get_secret_value() and (secret := read_secrets(home).get("node")):
            found["node_key"] = SecretStr(secret)
    if not os.environ.get("TIDEPOOL_REDIS_URL") and (port := remembered_port(home, EmbeddedValkey.name)):
        found["redis_url"] = SecretStr(EmbeddedValkey(home, port).url())
    return settings.model_copy(update=found)
