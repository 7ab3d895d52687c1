"""Batches of all tenants for operators: filters, speed, failed lines, cancelling, and whose words are shown to whom."""

from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, update

from controlplane.dispatcher.finalize import FINALIZE
from controlplane.policies.batch_ends import BatchEnd
from controlplane.policies.lifecycle import BatchState
from controlplane.store.batch_ends import write_ends
from controlplane.store.batch_tables import Batch, BatchResult
from controlplane.store.batches import BatchError, BatchRequestState, end_requests, fail_batch
from controlplane.store.blobs.base import BlobStore
from controlplane.store.queue import Outcome, finish
from controlplane.store.tables import Role
from tests.controlplane.api.conftest import Ask
from tests.controlplane.world import MODEL, World, claim_waiting

MARKUP = "<img src=x onerror=alert(1)>"


def end_lines(world: World, *statuses: int) -> None:
    """The first waiting lines end with these HTTP statuses; a refusal quotes the request."""
    with world.database.transaction() as session:
        outcomes = [
            Outcome(
                claim=held,
                status_code=status,
                body={"error": {"code": f"code_{status}", "message": MARKUP}} if status >= 400 else {},
                input_tokens=7,
                output_tokens=3,
            )
            for held, status in zip(claim_waiting(session, len(statuses)), statuses, strict=True)
        ]
        assert len(finish(session, outcomes)) == len(statuses)


def errors(ask: Ask, batch_id: str, role: str = "operator") -> list[tuple[Any, ...]]:
    """All failed lines, a page of two at a time."""
    found, after = [], None
    while True:
        params = {"limit": 2} | ({} if after is None else {"after": after})
        page = ask("GET", f"/admin/batches/{batch_id}/errors", params=params, role=role)
        found += [(row["line"], row["custom_id"], row["status"], row["code"], row["message"]) for row in page["data"]]
        after = page["next"]
        assert page["has_more"] == (after is not None)
        if after is None:
            return found


def test_batches_of_all_tenants_are_filtered_and_paged(world: World, ask: Ask) -> None:
    open_one, other, validating = world.add_batch(lines=4), world.add_batch(lines=1, tenant="blue"), world.add_batch()

    def ids(**params: Any) -> list[str]:
        return [row["id"] for row in ask("GET", "/admin/batches", role="viewer", params=params)["data"]]

    assert ids() == [validating, other, open_one], "the newest first"
    assert ids(tenant="blue") == [other]
    assert ids(model=MODEL) == [other, open_one]
    assert ids(model="unknown") == []
    assert ids(state="validating") == [validating]
    assert ids(at_risk=True) == []
    with world.database.transaction() as session:
        number = session.get_one(Batch, other).number
        write_ends(session, {number: BatchEnd(in_s=7200.0, at_risk=True, reason="too much")}, now_s=0.0)
    assert ids(at_risk=True) == [other]
    assert ids(at_risk=False) == [validating, open_one]
    ask("POST", f"/admin/batches/{validating}/cancel")
    assert ids(state="cancelling") == [validating]
    assert ids(ended=True) == []
    assert ids(ended=False, tenant="acme") == [validating, open_one]
    page = ask("GET", "/admin/batches", role="viewer", params={"limit": 2})
    rest = ask("GET", "/admin/batches", role="viewer", params={"after": page["next"]})
    assert [row["id"] for row in page["data"] + rest["data"]] == [validating, other, open_one]
    assert ask("GET", "/admin/batches", params={"state": "running"}, status=400)["param"] == "state"
    ask("GET", "/admin/batches", role="client", status=403)


def test_how_a_batch_goes(world: World, ask: Ask) -> None:
    batch_id = world.add_batch(lines=6)
    end_lines(world, 200, 200, 400)
    with world.database.transaction() as session:
        number = session.get_one(Batch, batch_id).number
        write_ends(session, {number: BatchEnd(in_s=7200.0, at_risk=True, reason="no instance")}, now_s=0.0)
    shown = ask("GET", f"/admin/batches/{batch_id}", role="viewer")
    assert (shown["state"], shown["total"], shown["completed"], shown["failed"]) == ("in_progress", 6, 2, 1)
    assert (shown["at_risk"], shown["reason"], shown["models"]) == (True, "no instance", [MODEL])
    assert shown["by_model"] == [{"model": MODEL, "lines": 6, "completed": 2, "failed": 1}]
    assert 0 < shown["lines_per_s"] <= 3
    assert "metadata" not in shown
    with world.database.transaction() as session:
        session.execute(update(BatchResult).values(finished_at=func.now() - timedelta(hours=1)))
    assert ask("GET", f"/admin/batches/{batch_id}", role="viewer")["lines_per_s"] == 0, "no line of late"
    assert ask("GET", "/admin/batches/batch_none", role="viewer", status=404)["param"] == "batch_id"


def test_an_ended_batch_keeps_its_models_and_its_failed_lines(world: World, blobs: BlobStore, ask: Ask) -> None:
    batch_id = world.add_batch(lines=5)
    end_lines(world, 400, 200, 503)
    while_open = errors(ask, batch_id)
    assert [row[0] for row in while_open] == [1, 3]
    with world.database.transaction() as session:
        keys = [held.key for held in claim_waiting(session, 2)]
        end_requests(session, keys, state=BatchRequestState.EXPIRED)
    for _ in range(2):
        assert world.step(FINALIZE, blobs) == batch_id
    shown = ask("GET", f"/admin/batches/{batch_id}", role="viewer")
    assert (shown["state"], shown["completed"], shown["failed"], shown["models"]) == ("expired", 1, 4, [MODEL])
    assert (shown["lines_per_s"], shown["predicted_end_at"]) == (None, None)
    assert shown["by_model"] == [{"model": MODEL, "lines": 5, "completed": None, "failed": None}]
    found = errors(ask, batch_id)
    assert found[:2] == while_open == [(1, "c1", 400, "code_400", MARKUP), (3, "c3", 503, "code_503", MARKUP)]
    assert [(line, code) for line, _, _, code, _ in found[2:]] == [(4, "batch_expired"), (5, "batch_expired")]
    for no_cursor in ("x", "1|", "1|2|3", "1|3", "-1"):
        ask("GET", f"/admin/batches/{batch_id}/errors", params={"after": no_cursor}, status=400)
    ask("GET", f"/admin/batches/{batch_id}/errors", role="viewer", status=403)


def test_a_page_of_failed_lines_reads_none_of_those_before(world: World, blobs: BlobStore, ask: Ask) -> None:
    batch_id = world.add_batch(lines=3)
    end_lines(world, 400, 503, 400)
    for _ in range(2):
        assert world.step(FINALIZE, blobs) == batch_id
    first = ask("GET", f"/admin/batches/{batch_id}/errors", params={"limit": 1})
    file_id = world.batch(batch_id).error_file_id
    assert file_id is not None
    with blobs.open(file_id) as stream:
        lines = stream.read().splitlines(keepends=True)
    with blobs.writing(file_id) as stream:
        stream.write(b"?" * len(lines[0]) + b"".join(lines[1:]))
    rest = ask("GET", f"/admin/batches/{batch_id}/errors", params={"after": first["next"]})
    assert [row["line"] for row in first["data"] + rest["data"]] == [1, 2, 3]
    beyond = ask("GET", f"/admin/batches/{batch_id}/errors", params={"after": "1|999999999"})
    assert beyond == {"data": [], "has_more": False, "next": None}


def test_what_another_tenant_wrote_is_left_out(world: World, ask: Ask) -> None:
    batch_id = world.add_batch(lines=3, tenant="blue")
    end_lines(world, 400, 503)
    for role in ("operator", "admin"):
        assert errors(ask, batch_id, role=role) == [
            (1, None, 400, "code_400", None),
            (2, None, 503, "code_503", MARKUP),
        ]


@pytest.mark.parametrize("tenant", ["acme", "blue"])
def test_what_the_validation_of_a_batch_found(world: World, ask: Ask, tenant: str) -> None:
    batch_id = world.add_batch(tenant=tenant)
    found = [BatchError(code="invalid_model", message=f"no model {MARKUP}", line=n) for n in (2, 3)]
    with world.database.transaction() as session:
        fail_batch(session, session.get_one(Batch, batch_id), [*found, BatchError(code="empty", message="none")])
    own = tenant == "acme"
    said = f"no model {MARKUP}" if own else None
    assert errors(ask, batch_id) == [
        (2, None, None, "invalid_model", said),
        (3, None, None, "invalid_model", said),
        (None, None, None, "empty", "none" if own else None),
    ]
    assert ask("GET", f"/admin/batches/{batch_id}", role="viewer")["invalid_lines"] == 3


def test_an_operator_cancels_a_batch_and_the_audit_says_so(world: World, ask: Ask) -> None:
    batch_id = world.add_batch(lines=3, tenant="blue")
    ask("POST", f"/admin/batches/{batch_id}/cancel", role="viewer", status=403)
    for _ in range(2):
        assert ask("POST", f"/admin/batches/{batch_id}/cancel")["state"] == BatchState.CANCELLING
    [event] = ask("GET", "/admin/audit", role="viewer", params={"kind": "batch"})["data"]
    assert (event["actor"], event["action"], event["subject"]) == (Role.OPERATOR, "batch.cancel", batch_id)
    assert event["before"] == {"tenant": "blue", "state": "in_progress"}
    assert event["after"] == {"tenant": "blue", "state": "cancelling"}
    with world.database.transaction() as session:
        fail_batch(session, session.get_one(Batch, batch_id), [])
    done = world.add_batch()
    with world.database.transaction() as session:
        fail_batch(session, session.get_one(Batch, done), [])
    ask("POST", f"/admin/batches/{done}/cancel", status=409)


def test_files_of_another_tenant_are_not_to_be_had(world: World, api: TestClient, secrets: dict[str, str]) -> None:
    batch_id = world.add_batch(lines=1, tenant="blue")
    input_id = world.batch(batch_id).input_file_id
    for role in ("operator", "admin"):
        headers = {"Authorization": f"Bearer {secrets[role]}"}
        assert api.get(f"/v1/files/{input_id}/content", headers=headers).status_code == 404
        assert api.get(f"/v1/batches/{batch_id}", headers=headers).status_code == 404
