"""Batches of the old queue live through 0005: those that had ended keep their counts, the others go on and end."""

from typing import Any

import msgspec
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text

from controlplane.dispatcher.finalize import FINALIZE
from controlplane.store.batch_tables import Batch
from controlplane.store.batches import BatchCounts, counts_of
from controlplane.store.blobs.base import BlobStore
from controlplane.store.queue import Outcome, claim, expire_leases, finish
from tests.controlplane.world import World

FILE = "INSERT INTO files (id, tenant, filename, purpose, bytes) VALUES ('file-1', 'acme', 'in.jsonl', 'batch', 1)"
BATCH = (
    "INSERT INTO batches (id, tenant, endpoint, completion_window, state, input_file_id, deadline_at, ended_at)"
    " VALUES (:id, 'acme', '/v1/completions', '24h', :state, 'file-1', now() + interval '1 d',"
    " CASE WHEN :ended THEN now() END)"
)
REQUEST = (
    "INSERT INTO batch_requests (batch_id, line, custom_id, model, body, state, attempts, lease_id, lease_until,"
    " deadline_at) VALUES (:batch, :line, :custom_id, 'tide', :body, :state, :attempts,"
    " CASE WHEN :leased THEN 'lease' END, CASE WHEN :leased THEN now() - interval '1 s' END,"
    " now() + interval '1 d') RETURNING id"
)
RESULT = (
    "INSERT INTO batch_results (request_id, status_code, body, upstream_id) VALUES (:id, :code, '{\"n\": 1}', 'old')"
)
BATCHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "batch_1": ("completed", ("completed", "failed", "completed")),
    "batch_2": ("in_progress", ("completed", "waiting")),
    "batch_3": ("in_progress", ("running",)),
    "batch_4": ("finalizing", ("completed", "failed")),
}


def fill(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(FILE))
        for batch_id, (state, requests) in BATCHES.items():
            connection.execute(text(BATCH), {"id": batch_id, "state": state, "ended": state == "completed"})
            for line, each in enumerate(requests, start=1):
                values: dict[str, Any] = {"batch": batch_id, "line": line, "state": each}
                leased = each == "running"
                values |= {"custom_id": f"c{line}", "body": '{"model": "tide"}'}
                values |= {"attempts": int(leased), "leased": leased}
                request = connection.execute(text(REQUEST), values).scalar_one()
                if each in {"completed", "failed"}:
                    connection.execute(text(RESULT), {"id": request, "code": 200 if each == "completed" else 400})


def old_requests(engine: Engine) -> list[tuple[Any, ...]]:
    with engine.begin() as connection:
        rows = connection.execute(
            text(
                "SELECT batch_id, line, custom_id, model, asked.body ->> 'model', state, lease_id IS NULL, upstream_id"
                " FROM batch_requests AS asked LEFT JOIN batch_results AS result ON result.request_id = asked.id"
                " ORDER BY batch_id, line"
            )
        ).all()
    return [tuple(row) for row in rows]


def test_old_batches_end_as_they_should(world: World, blobs: BlobStore, engine: Engine, config: Config) -> None:
    world.database.engine.dispose()
    command.downgrade(config, "0004")
    fill(engine)
    command.upgrade(config, "head")
    with world.database.transaction() as session:
        rows = [session.get_one(Batch, batch_id) for batch_id in BATCHES]
        assert [(row.completed, row.failed) for row in rows] == [(2, 1), (0, 0), (0, 0), (0, 0)]
        assert counts_of(session, rows) == {
            "batch_1": BatchCounts(total=3, completed=2, failed=1),
            "batch_2": BatchCounts(total=2, completed=1),
            "batch_3": BatchCounts(total=1),
            "batch_4": BatchCounts(total=2, completed=1, failed=1),
        }
        assert expire_leases(session, attempts_max=5, count_max=1000) == 1, "who had it is of the old schema"
        session.execute(text("UPDATE queued_requests SET not_before = NULL"))
        held = claim(session, {(rows[1].number, "tide"): 5, (rows[2].number, "tide"): 5}, lease_s=60)
        assert [(each.batch_id, each.line, each.epoch) for each in held] == [("batch_2", 2, 1), ("batch_3", 1, 3)]
        assert len(finish(session, [Outcome(claim=each, status_code=200, body={"n": 2}) for each in held])) == 2
    for _ in range(5):
        assert world.step(FINALIZE, blobs) is not None
    ended = [world.batch(batch_id) for batch_id in BATCHES]
    assert [(row.state, row.completed, row.failed) for row in ended] == [
        ("completed", 2, 1),
        ("completed", 2, 0),
        ("completed", 1, 0),
        ("completed", 1, 1),
    ]
    with blobs.open(str(ended[1].output_file_id)) as stream:
        answers = [msgspec.json.decode(line) for line in stream]
    assert [(each["custom_id"], each["response"]["body"]["n"]) for each in answers] == [("c1", 1), ("c2", 2)]


def test_down_and_up_again_keeps_what_is_unfinished(world: World, engine: Engine, config: Config) -> None:
    world.database.engine.dispose()
    command.downgrade(config, "0004")
    fill(engine)
    before = [row for row in old_requests(engine) if row[0] != "batch_1"]
    assert len(before) == 5
    for _ in range(2):
        command.upgrade(config, "head")
        command.downgrade(config, "0004")
        assert old_requests(engine) == before, "of what has ended the counts and the files remain"
    command.upgrade(config, "head")
