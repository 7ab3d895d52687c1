"""Expiring ends what is over, and nothing more the second time."""

import errno
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from controlplane.errors import UnavailableError
from controlplane.planner.expire import expire, sweep
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.blobs.folder import FolderBlobs
from controlplane.store.blobs.mirrored import MirroredBlobs
from controlplane.store.blobs.open import open_blobs
from controlplane.store.fleet import fleet_index
from controlplane.store.queue import expire_leases
from controlplane.store.request_log import RequestRecord, find_requests, write_requests
from controlplane.store.responses import ResponseRow, StoredResponse, add_response
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Desired, Instance, InstanceLease
from tests.controlplane.world import World, claim_waiting


def test_everything_that_is_over(world: World, blobs: BlobStore) -> None:
    world.join("n1")
    world.join("n2")
    late, batch_id = world.add_batch(lines=1), world.add_batch(lines=2)
    file_id = world.batch(batch_id).input_file_id
    with blobs.writing(file_id) as stream:
        stream.write(b"x")
    with world.database.transaction() as session:
        claim_waiting(session, 1)
        session.execute(text("UPDATE queued_requests SET lease_until = now() - interval '1 s' WHERE line = 1"))
        session.execute(text(f"UPDATE batches SET deadline_at = now() - interval '1 s' WHERE id = '{late}'"))
        session.execute(text("UPDATE nodes SET last_seen_at = now() - interval '61 s' WHERE name = 'n2'"))
        session.execute(text("UPDATE files SET expires_at = now() - interval '1 s'"))
    first = expire(world.database, blobs, world.settings)
    assert first.done() == {"leases": 1, "requests": 1, "files": 2, "silent_nodes": 1}
    again = expire(world.database, blobs, world.settings)
    assert (again.done(), again.error) == ({}, None)
    assert not list((world.settings.home / "files").iterdir())
    with world.database.transaction() as session:
        waiting = session.execute(text("SELECT line FROM queued_requests WHERE lease_until IS NULL ORDER BY line"))
        assert waiting.scalars().all() == [1, 2]
        ended = session.execute(text("SELECT state FROM batch_results")).scalars().all()
    assert ended == ["expired"]


@pytest.fixture
def impatient(settings: Settings) -> Iterator[Database]:
    """The test's database, for whom a statement may take a second."""
    database = Database(make_engine(settings.model_copy(update={"database_timeout_s": 1})))
    yield database
    database.close()


def test_a_job_that_fails_holds_up_none_of_the_others(world: World, blobs: BlobStore, impatient: Database) -> None:
    """The request log cannot be deleted from, nor the fleet be locked, and yet a lease and a deadline are over."""
    world.join("n1")
    world.join("n2")
    world.place("n2")
    late, _ = world.add_batch(lines=1), world.add_batch(lines=1)
    with world.database.transaction() as session:
        claim_waiting(session, 1)
        session.execute(text("UPDATE queued_requests SET lease_until = now() - interval '1 s'"))
        session.execute(text(f"UPDATE batches SET deadline_at = now() - interval '1 s' WHERE id = '{late}'"))
        session.execute(text("UPDATE nodes SET last_seen_at = now() - interval '61 s' WHERE name = 'n2'"))
        session.execute(text("UPDATE instances SET changed_at = now() - interval '30 s'"))  # set back since then
        session.execute(text("UPDATE files SET expires_at = now() - interval '1 s'"))
    with world.database.transaction() as other:
        fleet_index(other, lock=True)
        other.execute(text("LOCK TABLE request_log IN ACCESS EXCLUSIVE MODE"))
        expired = expire(impatient, blobs, world.settings)
    assert expired.done() == {"leases": 1, "requests": 1, "files": 2}
    assert expired.failed.keys() == {"silent_nodes", "request_log"}
    assert "request_log: OperationalError" in str(expired.error)
    assert expire(impatient, blobs, world.settings).done() == {"silent_nodes": 1}


def test_lost_nodes_do_not_wait_until_large_batches_are_expired(
    world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []

    def note(name: str) -> None:
        monkeypatch.setattr(f"controlplane.planner.expire.{name}", lambda *_, **__: began.append(name) or 0)

    for name in ("_expire_requests", "_lose_nodes"):
        note(name)
    assert expire(world.database, blobs, world.settings).error is None
    assert began == ["_lose_nodes", "_expire_requests"]


def test_a_batch_that_cannot_be_expired_holds_up_none_of_the_others(
    world: World, blobs: BlobStore, impatient: Database
) -> None:
    """A transaction that writes results of the first one does not end."""
    numbers = [world.batch(world.add_batch(lines=2, tenant=tenant)).number for tenant in ("acme", "other", "third")]
    with world.database.transaction() as session:
        session.execute(text("UPDATE batches SET deadline_at = now() - interval '1 s'"))
    with world.database.transaction() as writing:
        writing.execute(text("SELECT pg_advisory_xact_lock_shared(:lock)"), {"lock": -numbers[0]})
        expired = expire(impatient, blobs, world.settings)
        assert "requests: OperationalError" in str(expired.error)
        open_batches = writing.scalars(text("SELECT DISTINCT batch_number FROM queued_requests")).all()
    assert open_batches == numbers[:1]
    assert expire(impatient, blobs, world.settings).done() == {"requests": 2}


def test_a_slow_deletion_rolls_back_no_other(world: World, blobs: BlobStore, impatient: Database) -> None:
    with world.database.transaction() as session:
        old_rows(session, 2)
    with world.database.transaction() as other:
        other.execute(text("LOCK TABLE demand_buckets IN ACCESS EXCLUSIVE MODE"))
        swept = sweep(impatient, blobs, world.settings, now_s=time.time())
    assert (swept.done(), swept.failed.keys()) == ({"events": 2}, {"demand"})
    assert sweep(impatient, blobs, world.settings, now_s=time.time()).done() == {"demand": 2}


def test_what_is_old_goes_by_default_however_much_it_is(world: World, blobs: BlobStore) -> None:
    with world.database.transaction() as session:
        old_rows(session, 12_000)
    assert sweep(world.database, blobs, world.settings, now_s=time.time()).done() == {
        "demand": 12_000,
        "events": 12_000,
    }


def test_demand_that_forecasts_read_is_kept() -> None:
    with pytest.raises(ValueError, match="demand_keep_days must cover forecast_history_s"):
        Settings(demand_keep_days=8, forecast_history_s=9 * 86_400)


def old_rows(session: Session, count: int) -> None:
    """So many events and minutes of demand of half a year ago."""
    session.execute(
        text(
            "INSERT INTO demand_buckets (model, region, kind, start_s, tokens_per_s) SELECT 'tide', 'us-east', 'IW',"
            " 60 * (floor(extract(epoch FROM now()) / 60) - 180 * 1440 - number), 1 FROM generate_series(1, :count)"
            " AS number"
        ),
        {"count": count},
    )
    session.execute(
        text(
            "INSERT INTO events (kind, what, subject, at) SELECT 'node', 'joined', 'n1', now() - interval '180 days'"
            " FROM generate_series(1, :count)"
        ),
        {"count": count},
    )


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
    assert sweep(world.database, blobs, world.settings, now_s=1e9).done() == {"stopped_instances": 1}
    with world.database.transaction() as session:
        assert set(session.scalars(select(Instance.id))) == {names[6], running}
        assert session.scalars(select(InstanceLease)).all() == []


def test_old_rows_of_the_request_log_are_forgotten(world: World, blobs: BlobStore) -> None:
    now = datetime.now(UTC)
    ended = {"new": now, "old": now - timedelta(seconds=world.settings.request_log_keep_s + 60)}
    with world.database.transaction() as session:
        write_requests(
            session,
            [RequestRecord(request_id=name, ended_at=at, endpoint="/v1/completions") for name, at in ended.items()],
        )
    expire(world.database, blobs, world.settings)
    with world.database.transaction() as session:
        assert find_requests(session, "old") == []
        assert len(find_requests(session, "new")) == 1


def test_responses_are_kept_as_long_as_the_setting_says(world: World, blobs: BlobStore) -> None:
    for name, days in (("resp_new", 0), ("resp_old", world.settings.response_keep_days + 1)):
        response = {"id": name, "previous_response_id": None, "status": "completed"}
        with world.database.transaction() as session:
            add_response(session, StoredResponse(response=response, input=[]), tenant="acme")
            session.execute(
                text(f"UPDATE responses SET created_at = now() - interval '{days} days' WHERE id = '{name}'")
            )
    assert sweep(world.database, blobs, world.settings, now_s=1e9).done() == {"responses": 1}
    with world.database.transaction() as session:
        assert list(session.scalars(select(ResponseRow.id))) == ["resp_new"]


def test_a_request_that_loses_every_dispatcher_ends_in_the_error_file(world: World) -> None:
    world.add_batch(lines=2)
    with world.database.transaction() as session:
        claim_waiting(session, 2)
        session.execute(text("UPDATE queued_requests SET lease_until = now() - interval '1 s'"))
        session.execute(text("UPDATE queued_requests SET attempts = 5 WHERE line = 2"))
    with world.database.transaction() as session:
        assert expire_leases(session, attempts_max=5, count_max=1000) == 2
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
    assert sweep(world.database, blobs, world.settings, now_s=time.time()).done() == {"blobs": 2}
    assert {path.name for path in folder.iterdir()} == {known, "file-fresh"}


def test_the_sweep_copies_known_files_that_only_one_of_two_stores_has(world: World, tmp_path: Path) -> None:
    far = tmp_path / "far"
    settings = world.settings.model_copy(update={"files_copy_url": f"file://{far}"})
    known = world.batch(world.add_batch(lines=1)).input_file_id
    near = world.settings.home / "files"
    blobs = open_blobs(settings)
    for folder, name in ((near, known), (far, "file-unknown"), (near, "file-half.part")):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - 120, time.time() - 120))
    assert sweep(world.database, blobs, settings, now_s=time.time()).done() == {"file_copies": 1}
    assert (far / known).read_bytes() == b"x"
    (near / known).unlink()
    os.utime(far / known, (time.time() - 120, time.time() - 120))
    assert sweep(world.database, blobs, settings, now_s=time.time()).done() == {"file_copies": 1}
    assert (near / known).read_bytes() == b"x"
    assert sweep(world.database, blobs, settings, now_s=time.time()).done() == {}


def test_a_file_that_cannot_be_read_or_deleted_holds_up_none_of_the_others(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = FolderBlobs(tmp_path / "near"), FolderBlobs(tmp_path / "far")
    known, orphans = [world.batch(world.add_batch(lines=1)).input_file_id for _ in range(5)], ["file-1", "file-2"]
    for name in (*known, *orphans):
        (tmp_path / "near" / name).write_bytes(b"x")
        os.utime(tmp_path / "near" / name, (0, 0))

    def failing(name: str) -> IO[bytes]:
        raise OSError(errno.EIO, "Input/output error")

    opened, deleted = near.open, near.delete
    monkeypatch.setattr(near, "open", lambda name: failing(name) if name == known[0] else opened(name))
    swept = sweep(world.database, MirroredBlobs(near, far, at_once=False), world.settings, now_s=time.time())
    assert swept.failed == {"file_copies": "OSError: [Errno 5] Input/output error"}
    assert {path.name for path in (tmp_path / "far").iterdir()} == set(known[1:])
    for name in orphans:
        (tmp_path / "near" / name).write_bytes(b"x")
        os.utime(tmp_path / "near" / name, (0, 0))
    monkeypatch.setattr(near, "delete", lambda name: failing(name) if name == orphans[0] else deleted(name))
    assert sweep(world.database, near, world.settings, now_s=time.time()).failed.keys() == {"blobs"}
    assert {path.name for path in (tmp_path / "near").iterdir()} == {*known, orphans[0]}
    with world.database.transaction() as session:
        session.execute(text("UPDATE files SET expires_at = now() - interval '1 s'"))
    monkeypatch.setattr(near, "delete", lambda name: failing(name) if name == known[0] else deleted(name))
    assert expire(world.database, near, world.settings).failed.keys() == {"files"}
    assert {path.name for path in (tmp_path / "near").iterdir()} == {known[0], orphans[0]}


def test_where_the_store_is_away_a_job_soon_ends(
    world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question may take long."""
    asked: list[str] = []

    def away(name: str) -> None:
        asked.append(name)
        raise UnavailableError("the store for files does not answer", retry_after_s=5)

    for number in range(40):
        path = world.settings.home / "files" / f"file-{number}"
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    monkeypatch.setattr(blobs, "delete", away)
    assert sweep(world.database, blobs, world.settings, now_s=time.time()).failed.keys() == {"blobs"}
    first = set(asked)
    assert 1 < len(first) < 20
    assert sweep(world.database, blobs, world.settings, now_s=time.time()).failed.keys() == {"blobs"}
    assert set(asked) > first, "not always the same"
