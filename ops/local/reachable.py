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
from ops.local.postgres_cluster import PostgresCluster, regions_at
from ops.local.supervisor import Supervisor


@contextmanager
def reachable_database(home: Path, *, new: bool) -> Iterator[Settings]:
    """Settings whose database is up while the block runs: of several regions, their primary. `new`: an embedded one is
    made where there is none.

    Raises:
        EmbeddedError: there is no embedded server, or it cannot be prepared, or servers of several regions run and
            none takes writes.
        SupervisorError: it does not start.
    """
    settings = installed_settings(home)
    cluster = PostgresCluster(home, regions) if (regions := regions_at(home)) else None
    if os.environ.get("TIDEPOOL_DATABASE_URL") or (_is_up(home) if cluster is None else _has_primary(home, cluster)):
        yield settings
        return
    server = EmbeddedPostgres(home, free_port()) if cluster is None else cluster.alone()
    if not new and not server.is_made():
        raise EmbeddedError(f"{home} (TIDEPOOL_HOME) holds no installation, and TIDEPOOL_DATABASE_URL is not set")
    server.prepare()
    with Supervisor([server.child()]):
        yield settings.model_copy(update={"database_url": SecretStr(server.url())})


def _is_up(home: Path) -> bool:
    port = remembered_port(home, EmbeddedPostgres.name)
    return port is not None and EmbeddedPostgres(home, port).ping()


def _has_primary(home: Path, cluster: PostgresCluster) -> bool:
    """Whether a server takes writes; False: none runs."""
    running = [one for one in cluster.facts().values() if one.region is not None]
    if running and not any(one.takes_writes for one in running):
        regions = ", ".join(sorted(one.region or "" for one in running))
        raise EmbeddedError(f"{home} (TIDEPOOL_HOME): no Postgres takes writes (in {regions}): see `tidepool failover`")
    return bool(running)
