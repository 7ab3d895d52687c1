"""The database of an installation for a command: the configured one, or the embedded one, started where it is not."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr

from controlplane.settings import Settings
from ops.client.home import EmbeddedError, remembered_port
from ops.local.addresses import installed_settings
from ops.local.embedded import EmbeddedPostgres
from ops.local.ports import free_port
from ops.local.supervisor import Supervisor


@contextmanager
def reachable_database(home: Path, *, new: bool) -> Iterator[Settings]:
    """Settings whose database is up while the block runs. `new`: an embedded one is made where there is none.

    Raises:
        EmbeddedError: there is no embedded server, or it cannot be prepared.
        SupervisorError: it does not start.
    """
    settings = installed_settings(home)
    port = remembered_port(home, EmbeddedPostgres.name)
    if os.environ.get("TIDEPOOL_DATABASE_URL") or (port is not None and EmbeddedPostgres(home, port).ping()):
        yield settings
        return
    server = EmbeddedPostgres(home, free_port())
    if not new and not server.is_made():
        raise EmbeddedError(f"{home} (TIDEPOOL_HOME) holds no installation, and TIDEPOOL_DATABASE_URL is not set")
    server.prepare()
    with Supervisor([server.child()]):
        yield settings.model_copy(update={"database_url": SecretStr(server.url())})
