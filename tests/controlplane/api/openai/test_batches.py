"""The Batch API, as the official client sees it. What a dispatcher makes of a batch is tested there."""

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from controlplane.policies.batch_ends import BatchEnd
from controlplane.policies.lifecycle import BatchState
from controlplane.store.batch_ends import write_ends
from controlplane.store.batch_tables import Batch, File
from controlplane.store.batches import move_batch
from controlplane.store.tables import Role
from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.api.openai.test_files import upload
from tests.controlplane.world import World


@pytest.fixture
def gateway(world: World) -> Iterator[Gateway]:
    with running_gateway(world) as gateway:
        yield gateway


def create(gateway: Gateway, **changes: Any) -> Any:
    values: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
    return gateway.client.batches.create(**(values | changes))


def test_a_batch_is_accepted_listed_and_cancelled(gateway: Gateway) -> None:
    file = upload(gateway)
    batch = create(gateway, input_file_id=file.id, metadata={"job": "night"})
    assert (batch.status, batch.input_file_id, batch.endpoint) == ("validating", file.id, "/v1/completions")
    assert batch.expires_at - batch.created_at == 86_400
    assert batch.metadata == {"job": "night"}
    assert batch.request_counts.total == 0
    again = create(gateway, input_file_id=file.id, completion_window="1h")
    assert [b.id for b in gateway.client.batches.list(limit=1)] == [again.id, batch.id]
    assert gateway.client.batches.retrieve(batch.id).created_at == batch.created_at
    soon = create(gateway, input_file_id=file.id, completion_window="30m")
    assert soon.expires_at - soon.created_at == 1800
    cancelled = gateway.client.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    assert cancelled.cancelling_at is not None
    assert gateway.client.batches.cancel(batch.id).status == "cancelling", "twice is once"


def test_the_predicted_end_is_shown_while_a_batch_is_in_progress(gateway: Gateway) -> None:
    batch_id = gateway.world.add_batch(lines=2, window_s=3600)
    assert gateway.client.batches.retrieve(batch_id).model_extra == {
        "tidepool": {"predicted_end_at": None, "at_risk": False, "reason": None}
    }
    with gateway.world.database.transaction() as session:
        write_ends(session, {1: BatchEnd(in_s=7200.0, at_risk=True, reason="too much")}, now_s=0.0)
    shown = gateway.client.batches.retrieve(batch_id)
    extra = (shown.model_extra or {})["tidepool"]
    assert (extra["at_risk"], extra["reason"]) == (True, "too much")
    assert shown.expires_at is not None
    assert 3000 < extra["predicted_end_at"] - shown.expires_at < 4000
    scraped = gateway.http.get("/metrics").text
    assert "tidepool_batches_at_risk 1.0" in scraped
    late = re.search(r"^tidepool_batch_predicted_late_seconds (\S+)$", scraped, re.MULTILINE)
    assert late is not None
    assert 3000 < float(late[1]) < 4000
    admin = {"Authorization": f"Bearer {gateway.world.key(Role.ADMIN)}"}
    assert gateway.http.get("/admin/status", headers=admin).json()["batches_at_risk"] == 1
    gateway.client.batches.cancel(batch_id)
    assert gateway.client.batches.retrieve(batch_id).model_extra == {"tidepool": None}
    assert "tidepool_batches_at_risk 0.0" in gateway.http.get("/metrics").text


def test_the_whole_object(gateway: Gateway) -> None:
    keep = {"anchor": "created_at", "seconds": 7200}
    batch = create(gateway, input_file_id=upload(gateway).id, output_expires_after=keep)
    fields = gateway.http.get(f"/v1/batches/{batch.id}").json()
    assert fields["usage"] == {
        "input_tokens": 0,
        "output_tokens": 0,
        "total_tokens": 0,
    }
    with gateway.world.database.transaction() as session:
        row = session.get_one(Batch, batch.id)
        assert row.output_keep_s == 7200
        row.total, row.completed, row.failed, row.input_tokens, row.output_tokens = 3, 2, 1, 14, 6
        for state in (BatchState.IN_PROGRESS, BatchState.FINALIZING, BatchState.COMPLETED):
            move_batch(session, row, state)
    ended = gateway.client.batches.retrieve(batch.id)
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (3, 2, 1)
    assert ended.usage is not None
    assert (ended.usage.input_tokens, ended.usage.output_tokens, ended.usage.total_tokens) == (14, 6, 20)
    assert ended.completed_at is not None


def test_an_ended_batch_cannot_be_cancelled_and_the_client_does_not_insist(gateway: Gateway) -> None:
    batch = create(gateway, input_file_id=upload(gateway).id)
    with gateway.world.database.transaction() as session:
        move_batch(session, session.get_one(Batch, batch.id), BatchState.FAILED)
    with pytest.raises(openai.ConflictError) as caught:
        gateway.client.batches.cancel(batch.id)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert gateway.client.batches.retrieve(batch.id).failed_at is not None


def test_what_a_batch_may_not_be(gateway: Gateway) -> None:
    good = {"input_file_id": upload(gateway).id, "endpoint": "/v1/completions", "completion_window": "24h"}
    rows: list[tuple[dict[str, Any], int, str]] = [
        ({"endpoint": "/v1/rerank"}, 400, "endpoint"),
        ({"completion_window": "1d"}, 400, "completion_window"),
        ({"completion_window": "169h"}, 400, "completion_window"),
        ({"completion_window": "0h"}, 400, "completion_window"),
        ({"completion_window": "0m"}, 400, "completion_window"),
        ({"completion_window": "10081m"}, 400, "completion_window"),
        ({"completion_window": "30"}, 400, "completion_window"),
        ({"input_file_id": "file-unknown"}, 404, "file_id"),
        ({"input_file_id": "x" * 65}, 400, "input_file_id"),
        ({"input_file_id": "file-\0"}, 400, ""),
        ({"metadata": {str(n): "x" for n in range(17)}}, 400, "metadata"),
        ({"metadata": {"k": "x" * 513}}, 400, "metadata.k"),
        ({"metadata": {"k" * 65: "x"}}, 400, "metadata."),
        ({"metadata": {"k": "\0"}}, 400, ""),
        ({"priority": 1}, 400, "priority"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, 400, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 7200}}, 400, "output_expires_after.anchor"),
    ]
    for changes, status, param in rows:
        answer = gateway.http.post("/v1/batches", json=good | changes)
        assert answer.status_code == status, (changes, answer.text)
        assert (assert_error(answer)["param"] or "").startswith(param), (changes, answer.text)
    assert gateway.client.batches.list().data == []


def test_an_output_file_is_no_input(gateway: Gateway) -> None:
    file = upload(gateway)
    with gateway.world.database.transaction() as session:
        session.get_one(File, file.id).purpose = "batch_output"
    with pytest.raises(openai.BadRequestError) as caught:
        create(gateway, input_file_id=file.id)
    assert caught.value.param == "input_file_id"


def test_tenants_and_roles_are_kept_apart(gateway: Gateway) -> None:
    file = upload(gateway)
    batch = create(gateway, input_file_id=file.id)
    other = gateway.client_of(gateway.world.key(tenant="other"))
    assert other.batches.list().data == []
    for call in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.PermissionDeniedError):
        gateway.role(Role.VIEWER).batches.list()
    assert gateway.client.batches.retrieve(batch.id).status == "validating"
