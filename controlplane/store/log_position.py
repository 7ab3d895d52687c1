"""Where a Postgres is in its write-ahead log."""

from sqlalchemy import text
from sqlalchemy.orm import Session

from controlplane.policies.replica_age import LogPosition

_POSITION = text(
    """
    SELECT NOT standby AS takes_writes,
        CASE WHEN standby THEN lpad(upper(to_hex(coalesce(
                (SELECT received_tli FROM pg_stat_get_wal_receiver()),
                greatest(restart.timeline_id, recovery.min_recovery_end_timeline)
            ))), 8, '0')
            ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END AS timeline,
        pg_wal_lsn_diff(CASE WHEN standby THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, '0/0') AS bytes,
        extract(epoch FROM clock_timestamp()
            - coalesce(pg_last_xact_replay_timestamp(), restart.checkpoint_time)) AS replayed_ago_s
    FROM pg_is_in_recovery() AS standby, pg_control_checkpoint() AS restart, pg_control_recovery() AS recovery
    """
)
"""A standby's timeline is the one that it receives, which is told to roles with `pg_monitor`. Without that role, or
while nothing is received, it is the newest of which it has replayed something and written it to its disk: minutes late
after a promotion, perhaps, and never one that it does not follow.
"""


def takes_writes(session: Session) -> bool:
    """Whether the server is a primary; a standby, and one that is made a standby, take no writes."""
    return bool(session.scalar(text("SELECT current_setting('transaction_read_only') = 'off'")))


def read_log_position(session: Session) -> LogPosition:
    """The position of the server that the session is connected to."""
    row = session.execute(_POSITION).one()
    return LogPosition(
        bytes=int(row.bytes or 0),
        timeline=row.timeline,
        takes_writes=row.takes_writes,
        replayed_ago_s=None if row.replayed_ago_s is None else float(row.replayed_ago_s),
    )
