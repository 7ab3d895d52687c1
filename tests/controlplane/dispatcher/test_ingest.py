"""Validating a batch: every bad line is named, and all lines or none become requests."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from controlplane.database_address import libpq_url
from controlplane.dispatcher import ingest as ingestion
from controlplane.dispatcher.finalize import FINALIZE
from controlplane.dispatcher.ingest import VALIDATE
from controlplane.errors import InUseError, UnavailableError
from controlplane.store import queue
from controlplane.store.aliases import put_alias
from controlplane.store.batch_tables import Batch, BatchModel, BatchRequest, QueuedRequest
from controlplane.store.batches import NewRequest, cancel_batch
from controlplane.store.blobs.base import BlobStore
from controlplane.store.blobs.folder import FolderBlobs
from controlplane.store.removal import delete_model
from dataplane.protocol.messages import Generate
from tests.controlplane.world import PATIENCE_S, World, until


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    body = {"model": "tide", "prompt": "x", "max_tokens": 4} | changes.pop("body", {})
    body = changes.pop("body_is", body)
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return msgspec.json.encode({**fields, **changes}) + b"\n"


def submitted(world: World, blobs: BlobStore, *lines: bytes, tenant: str = "acme", **changes: Any) -> str:
    """A batch of these lines that waits for its validation."""
    batch_id = world.add_batch(tenant=tenant, **changes)
    with blobs.writing(world.batch(batch_id).input_file_id) as stream:
        stream.write(b"".join(lines))
    return batch_id


def ingest(world: World, blobs: BlobStore, *lines: bytes, **changes: Any) -> Any:
    """A batch of these lines after validation."""
    batch_id = submitted(world, blobs, *lines)
    assert world.step(VALIDATE, blobs, **changes) == batch_id
    assert world.step(VALIDATE, blobs) is None
    return world.batch(batch_id)


def requests_of(world: World) -> list[BatchRequest]:
    with world.database.transaction() as session:
        queued = list(session.scalars(select(QueuedRequest.line).order_by(QueuedRequest.line)))
        rows = list(session.scalars(select(BatchRequest).order_by(BatchRequest.line)))
    assert queued == [row.line for row in rows]
    return rows


@pytest.fixture
def drained(world: World) -> str:
    """A model without endpoints, which may be deleted."""
    world.add_model("ebb")
    with world.database.transaction() as session:
        session.execute(text("DELETE FROM endpoints WHERE model = 'ebb'"))
    return "ebb"


def delete(world: World, model: str) -> None:
    with world.database.transaction() as session:
        delete_model(session, model)


def test_a_model_that_is_deleted_while_lines_are_read_is_unknown(
    world: World, blobs: BlobStore, drained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ingestion.add_requests

    def deleting(session: Session, batch: Batch, requests: Iterator[NewRequest]) -> None:
        read(session, batch, requests)
        delete(world, drained)

    monkeypatch.setattr(ingestion, "add_requests", deleting)
    batch = ingest(world, blobs, line("a"), line("b", body={"model": drained}), line("c", body={"model": drained}))
    [error] = batch.errors["data"]
    assert (batch.state, requests_of(world)) == ("failed", [])
    monkeypatch.undo()
    unknown = ingest(world, blobs, line("a"), line("b", body={"model": drained}))
    assert unknown.errors["data"] == [error]


def test_a_model_is_not_deleted_while_a_batch_that_asks_for_it_begins(
    world: World, blobs: BlobStore, drained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, deletions = ingestion.keep_models, list[Future[None]]()

    def kept(session: Session, names: Collection[str]) -> set[str]:
        found = keep(session, names)
        deletions.append(thread.submit(delete, world, drained))
        until(lambda: deletions[0].done() or world.is_waiting_for_a_lock())
        return found

    monkeypatch.setattr(ingestion, "keep_models", kept)
    with ThreadPoolExecutor(1) as thread:
        assert ingest(world, blobs, line("a", body={"model": drained})).state == "in_progress"
        with pytest.raises(InUseError, match="open batch"):
            deletions[0].result()


def test_good_lines_become_requests(world: World, blobs: BlobStore) -> None:
    odd = {"prompt": "a\0b é \U0001f30a"}
    given = [line("a"), line("b", body=odd), line("c").rstrip()]
    batch = ingest(world, blobs, given[0], b"\n", *given[1:])
    assert (batch.state, batch.errors) == ("in_progress", None)
    assert batch.in_progress_at is not None
    rows = requests_of(world)
    assert [(r.line, r.custom_id) for r in rows] == [(1, "a"), (3, "b"), (4, "c")]
    message = msgspec.convert(rows[1].body, Generate)
    assert (message.model, message.prompt, message.sampling.max_tokens) == ("tide", odd["prompt"], 4)
    assert message.tier == "NIW"
    with world.database.transaction() as session:
        [group] = queue.batch_groups(session)
        [listed] = session.scalars(select(BatchModel))
        tokens = session.scalars(select(QueuedRequest.tokens).order_by(QueuedRequest.line)).all()
    assert (group.batch, group.model, group.waiting, batch.total) == (batch.number, "tide", 3, 3)
    assert (listed.model, listed.requests) == ("tide", 3)
    sizes = [len(msgspec.json.decode(each, type=dict[str, msgspec.Raw])["body"]) for each in given]
    assert tokens == [size // 4 + 4 for size in sizes], "a guess: bytes / 4, and the answer"


BAD = [
    (b"{oops\n", "invalid_json_line", None),
    (b"[1]\n", "invalid_json_line", None),
    (b'"\xff"\n', "invalid_json_line", None),
    (b"[" * 100_000 + b"\n", "invalid_json_line", None),
    (line(None), "missing_required_parameter", "custom_id"),
    (line(""), "missing_required_parameter", "custom_id"),
    (line("x" * 513), "missing_required_parameter", "custom_id"),
    (line("a\0"), "invalid_value", "custom_id"),
    (line(method="GET"), "invalid_method", "method"),
    (line(url="/v1/chat/completions"), "mismatched_url", "url"),
    (line(body={"prompt": None}), "invalid_value", "body.prompt"),
    (line(body={"stop": ["a", 1]}), "invalid_value", "body.stop"),
    (line(body_is=None), "missing_required_parameter", "body"),
    (line(body_is=[1]), "missing_required_parameter", "body"),
    (b'{"custom_id": "a"}\n', "invalid_method", "method"),
    (line().replace(b'"x"', b'"\xff"'), "invalid_value", "body"),
    (line().replace(b'"x"', b'"\\ud800"'), "invalid_json_line", None),
    (line().replace(b'"x"', b"NaN"), "invalid_json_line", None),
    (line(body={"model": "llama"}), "model_not_found", "body.model"),
    (line(body={"stream": True}), "invalid_value", "body.stream"),
    (line(body={"suffix": "x"}), "unsupported_parameter", "body.suffix"),
    (line(body={"max_tokens": 5000}), "context_length_exceeded", "body.max_tokens"),
    (line(body={"model": "a\0b"}), "model_not_found", "body.model"),
    (line(body={"a\0b": 1}), "unknown_parameter", "body.a\ufffdb"),
]


def test_each_bad_line_is_named(world: World, blobs: BlobStore) -> None:
    for bad, code, param in BAD:
        batch = ingest(world, blobs, line("first"), bad.rstrip() + b"\n", line("last"))
        assert batch.state == "failed"
        assert batch.ended_at is not None
        [error] = batch.errors["data"]
        assert (error["code"], error["param"], error["line"]) == (code, param, 2), error
        assert error["message"]
    assert requests_of(world) == []


def test_all_errors_are_shown_up_to_a_hundred(world: World, blobs: BlobStore) -> None:
    batch = ingest(world, blobs, line("a"), *[line("a")] * 150)
    assert len(batch.errors["data"]) == 100
    assert {error["code"] for error in batch.errors["data"]} == {"duplicate_custom_id"}
    assert "line 1" in batch.errors["data"][0]["message"]
    few = ingest(world, blobs, b"{\n", line("b"), line("b"))
    assert [(e["code"], e["line"]) for e in few.errors["data"]] == [
        ("invalid_json_line", 1),
        ("duplicate_custom_id", 3),
    ]


@pytest.mark.parametrize(
    ("lines", "code"),
    [([line(str(n)) for n in range(4)], "too_many_lines"), ([b"\n"], "empty_file"), ([], "empty_file")],
)
def test_too_many_and_too_few(world: World, blobs: BlobStore, lines: list[bytes], code: str) -> None:
    batch = ingest(world, blobs, *lines, batch_lines_max=3)
    assert (batch.state, batch.errors["data"][0]["code"]) == ("failed", code)
    assert requests_of(world) == []


def test_exactly_as_many_as_allowed(world: World, blobs: BlobStore) -> None:
    assert ingest(world, blobs, *[line(str(n)) for n in range(3)], batch_lines_max=3).state == "in_progress"


def test_a_file_that_is_gone(world: World, blobs: BlobStore) -> None:
    batch_id = world.add_batch()
    assert world.step(VALIDATE, blobs) == batch_id
    [error] = world.batch(batch_id).errors["data"]  # type: ignore[index]
    assert (error["code"], error["param"]) == ("file_not_found", "input_file_id")


def test_a_batch_being_validated_is_left_alone(world: World) -> None:
    batch_id = world.add_batch()

    def meanwhile() -> None:
        world.no_delay()
        assert world.step(VALIDATE, Interrupted(meanwhile)) is None

    assert world.step(VALIDATE, Interrupted(meanwhile)) == batch_id
    assert (world.batch(batch_id).state, len(requests_of(world))) == ("in_progress", 2)


def test_a_batch_is_cancelled_while_its_file_is_read(world: World, blobs: BlobStore) -> None:
    """At once; nothing of it is queued, and dispatchers are told when it can end."""
    batch_id = world.add_batch()
    address = libpq_url(world.settings.database_url.get_secret_value())
    with psycopg.connect(address, autocommit=True) as listener:

        def meanwhile() -> None:
            with world.database.transaction() as session:
                assert cancel_batch(session, batch_id, tenant="acme").state == "cancelling"
            assert world.step(FINALIZE, blobs) is None, "it is held"
            listener.execute("LISTEN tidepool_batches")

        assert world.step(VALIDATE, Interrupted(meanwhile)) == batch_id
        [told] = listener.notifies(timeout=PATIENCE_S, stop_after=1)
    assert told.payload.startswith("finalize")
    assert (world.batch(batch_id).state, requests_of(world)) == ("cancelling", [])
    assert world.step(FINALIZE, blobs) == batch_id
    assert world.batch(batch_id).state == "cancelled"


def test_a_defect_of_ours_fails_its_batch_and_blocks_no_other(
    world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr("controlplane.dispatcher.ingest.parse_json", broken)
        first = ingest(world, blobs, line("a"))
    assert first.state == "failed"
    assert [error["code"] for error in first.errors["data"]] == ["internal_error"]
    assert requests_of(world) == []
    assert ingest(world, blobs, line("b")).state == "in_progress"


class Interrupted(FolderBlobs):
    """A disk that gives one line, and then has `trouble`."""

    def __init__(self, trouble: Callable[[], None]) -> None:
        self._trouble = trouble

    @contextlib.contextmanager
    def open(self, file_id: str) -> Iterator[Iterator[bytes]]:  # type: ignore[override]
        def lines() -> Iterator[bytes]:
            yield line("a")
            self._trouble()
            yield line("b")

        yield lines()


@pytest.mark.parametrize("where", ["disk", "bucket", "Postgres"])
def test_trouble_on_the_way_is_not_the_batchs_fault(world: World, blobs: BlobStore, where: str) -> None:
    def trouble() -> None:
        if where == "disk":
            raise OSError("the disk is gone")
        if where == "bucket":
            raise UnavailableError("the bucket is gone")
        with world.database.transaction() as session:
            copying = "query LIKE 'COPY%' AND datname = current_database()"
            assert session.scalars(
                text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {copying}")
            ).all()

    first, second = submitted(world, blobs, line()), submitted(world, blobs, line())
    expected = {"disk": OSError, "bucket": UnavailableError, "Postgres": OperationalError}[where]
    for _ in range(3):
        world.no_delay()
        with pytest.raises(expected):
            world.step(VALIDATE, Interrupted(trouble), batch_attempts_max=2)
        assert [(world.batch(each).state, world.batch(each).attempts) for each in (first, second)] == [
            ("validating", 0)
        ] * 2
    assert requests_of(world) == []
    assert world.step(VALIDATE, blobs) == second, "those behind it go on"
    assert world.step(VALIDATE, blobs) is None
    world.no_delay()
    assert world.step(VALIDATE, blobs) == first, "and it is tried again"
    assert {world.batch(each).state for each in (first, second)} == {"in_progress"}


def test_trouble_for_longer_than_its_window_ends_a_batch(world: World, blobs: BlobStore) -> None:
    def trouble() -> None:
        raise OSError(5, "Input/output error", "/a/path/of/ours")

    batch_id = submitted(world, blobs, line())
    with world.database.transaction() as session:
        session.execute(text("UPDATE batches SET deadline_at = now() - interval '1 s'"))
    with pytest.raises(OSError, match="Input/output error"):
        world.step(VALIDATE, Interrupted(trouble))
    batch = world.batch(batch_id)
    assert batch.errors is not None
    [error] = batch.errors["data"]
    assert (batch.state, error["code"]) == ("failed", "attempts_exhausted")
    assert "its files cannot be read or written (Input/output error)" in error["message"]
    assert "/a/path" not in error["message"]


def test_the_lines_of_an_alias_get_its_main_model(world: World, blobs: BlobStore) -> None:
    world.add_model("tide-2")
    with world.database.transaction() as session:
        put_alias(session, "chat", {"tide": 5, "tide-2": 95})
        put_alias(session, "tide", {"tide": 0, "tide-2": 1})
    lines = [line("a", body={"model": "chat"}), line("b"), line("c", body={"model": "tide-2"})]
    assert ingest(world, blobs, *lines).state == "in_progress"
    rows = requests_of(world)
    with world.database.transaction() as session:
        assert set(session.scalars(select(QueuedRequest.model))) == {"tide-2"}
    assert {msgspec.convert(row.body, Generate).model for row in rows} == {"tide-2"}


def test_a_key_for_an_alias_may_put_it_in_a_batch_and_nothing_else(world: World, blobs: BlobStore) -> None:
    with world.database.transaction() as session:
        put_alias(session, "chat", {"tide": 1})
    batch_id = submitted(world, blobs, line("a", body={"model": "chat"}), line("b"))
    with world.database.transaction() as session:
        session.execute(text("UPDATE batches SET models = '[\"chat\"]'"))
    assert world.step(VALIDATE, blobs) == batch_id
    [error] = world.batch(batch_id).errors["data"]
    assert (error["code"], error["line"]) == ("model_not_found", 2)
