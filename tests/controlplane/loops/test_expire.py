"""Expiring ends what is over, and nothing more the second time."""

import os
import time
from datetime import UTC, datetime, timedelta

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from controlplane.loops.expire import expire, sweep
from controlplane.store.blobs.base import BlobStore
from controlplane.store.queue import claim, expire_leases, waiting_lots
from controlplane.store.request_log import RequestRecord, find_requests, write_requests
from controlplane.store.tables import Desired, Instance, SpotLease
from tests.controlplane.world import World


def lease_all(session: Session, count: int) -> None:
    """Up to `count` requests of each batch."""
    claim(session, {(lot.batch, lot.model): count for lot in waiting_lots(session)}, lease_s=60)


def test_everything_that_is_over(world: World, blobs: BlobStore) -> None:
    world.join("n1")
    world.join("n2")
    late, batch_id = world.add_batch(lines=1), world.add_batch(lines=2)
    file_id = world.batch(batch_id).input_file_id
    with blobs.writing(file_id) as stream:
        stream.write(b"x")
    with world.database.transaction() as session:
        lease_all(session, 1)
        session.execute(text("UPDATE queued_requests SET lease_until = now() - interval '1 s' WHERE line = 1"))
        session.execute(text(f"UPDATE batches SET deadline_at = now() - interval '1 s' WHERE id = '{late}'"))
        session.execute(text("UPDATE nodes SET last_seen_at = now() - interval '61 s' WHERE name = 'n2'"))
        session.execute(text("UPDATE files SET expires_at = now() - interval '1 s'"))
    first = expire(world.database, blobs, world.settings, now_s=1e9)
    assert (first.leases, first.requests, first.files, first.silent_nodes) == (1, 1, 2, ("n2",))
    again = expire(world.database, blobs, world.settings, now_s=1e9)
    assert (again.leases, again.requests, again.files) == (0, 0, 0)
    assert not list((world.settings.home / "files").iterdir())
    with world.database.transaction() as session:
        waiting = session.execute(text("SELECT line FROM queued_requests WHERE lease_until IS NULL ORDER BY line"))
        assert waiting.scalars().all() == [1, 2]
        ended = session.execute(text("SELECT state FROM batch_results")).scalars().all()
    assert ended == ["expired"]


def test_instances_stopped_long_ago_are_forgotten_with_their_leases(world: World, blobs: BlobStore) -> None:
    world.join("n1")
    names = {days: world.place("n1", desired=Desired.STOPPED) for days in (6, 8)}
    running = world.place("n1")
    with world.database.transaction() as session:
        for days, name in names.items():
            session.execute(
                text(f"UPDATE instances SET changed_at = now() - interval '{days} days' WHERE id = '{name}'")
            )
        session.execute(text(f"UPDATE instances SET changed_at = to_timestamp(0) WHERE id = '{running}'"))
        session.execute(
            text(
                "INSERT INTO spot_leases (id, instance_id, holder, created_by, expires_at, ended_at, end_reason) "
                f"VALUES ('l', '{names[8]}', 'lab', 'lab', now(), now(), 'lost')"
            )
        )
    expire(world.database, blobs, world.settings, now_s=1e9)
    with world.database.transaction() as session:
        assert set(session.scalars(select(Instance.id))) == {names[6], running}
        assert session.scalars(select(SpotLease)).all() == []


def test_old_rows_of_the_request_log_are_forgotten(world: World, blobs: BlobStore) -> None:
    now = datetime.now(UTC)
    ended = {"new": now, "old": now - timedelta(seconds=world.settings.request_log_keep_s + 60)}
    with world.database.transaction() as session:
        write_requests(
            session,
            [RequestRecord(request_id=name, ended_at=at, endpoint="/v1/completions") for name, at in ended.items()],
        )
    expire(world.database, blobs, world.settings, now_s=time.time())
    with world.database.transaction() as session:
        assert find_requests(session, "old") == []
        assert len(find_requests(session, "new")) == 1


def test_a_request_that_loses_every_dispatcher_ends_in_the_error_file(world: World) -> None:
    world.add_batch(lines=2)
    with world.database.transaction() as session:
        lease_all(session, 2)
        session.execute(text("UPDATE queued_requests SET lease_until = now() - interval '1 s'"))
        session.execute(text("UPDATE queued_requests SET attempts = 5 WHERE line = 2"))
    with world.database.transaction() as session:
        assert expire_leases(session, attempts_max=5) == 2
    with world.database.transaction() as session:
        waiting = session.execute(text("SELECT line FROM queued_requests WHERE lease_until IS NULL")).scalars().all()
        ended = session.execute(text("SELECT line, error ->> 'code' FROM batch_results")).all()
    assert (waiting, [tuple(row) for row in ended]) == ([1], [(2, "attempts_exhausted")])


def test_the_sweep_deletes_what_no_row_knows_of(world: World, blobs: BlobStore) -> None:
    known = world.batch(world.add_batch(lines=1)).input_file_id
    folder = world.settings.home / "files"
    for name in (known, "file-orphan", "file-half.part", "file-fresh"):
        (folder / name).write_bytes(b"x")
        if name != "file-fresh":
            os.utime(folder / name, (0, 0))
    assert sweep(world.database, blobs, world.settings, now_s=time.time()) == 2
    assert {path.name for path in folder.iterdir()} == {known, "file-fresh"}
