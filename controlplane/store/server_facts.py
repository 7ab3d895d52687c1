"""What the Postgres server says of itself: its version, clock, connections, replication and WAL archive."""

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session

_SERVER = """
SELECT current_setting('server_version_num')::int AS version,
  extract(epoch FROM clock_timestamp())::float8 AS now_s,
  pg_is_in_recovery() AS is_standby,
  (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
  current_setting('max_connections')::int AS connections_max,
  current_setting('fsync')::bool AS fsync,
  current_setting('synchronous_standby_names') AS quorum,
  current_setting('archive_mode') <> 'off' AS archiving,
  coalesce((SELECT last_failed_time > coalesce(last_archived_time, '-infinity') FROM pg_stat_archiver), false)
    AS archive_fails
"""
_STANDBYS = """
SELECT application_name AS name, state, sync_state, extract(epoch FROM replay_lag)::float8 AS lag_s
FROM pg_stat_replication ORDER BY application_name
"""


@dataclass(frozen=True, kw_only=True)
class Standby:
    """A server that streams from this one. None: this user may not see it, or it is not known yet. `lag_s`: how long
    the last write took to be visible there.
    """

    name: str | None
    state: str | None
    sync_state: str | None
    lag_s: float | None


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """The server of one connection. `version`: 180006 is 18.6; `now_s`: Unix time of its clock; `quorum`:
    `synchronous_standby_names`, empty where a commit waits for no standby; `archive_fails`: the last WAL file that was
    to be archived was not.
    """

    version: int
    now_s: float
    is_standby: bool
    connections: int
    connections_max: int
    fsync: bool
    quorum: str
    archiving: bool
    archive_fails: bool
    standbys: tuple[Standby, ...] = ()


def read_server(session: Session) -> ServerFacts:
    """The server that this session is connected to."""
    row = session.execute(text(_SERVER)).mappings().one()
    standbys = session.execute(text(_STANDBYS)).mappings().all()
    return ServerFacts(**row, standbys=tuple(Standby(**each) for each in standbys))
