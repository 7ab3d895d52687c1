"""What callers hear of a change that Postgres refuses."""

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from tests.controlplane.api.conftest import Ask


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO regions (name, position) VALUES ('us-east', 9)",
        "INSERT INTO endpoints (model, region, instances_min, instances_max) VALUES ('gone', 'us-east', 0, 1)",
    ],
    ids=["a row is there by now", "a row is gone by now"],
)
def test_a_change_that_collides_is_refused_and_logged(
    ask: Ask, fleet: None, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    def put_tenant(session: Session, _row: Any) -> None:
        session.execute(text(statement))

    monkeypatch.setattr("controlplane.store.tenants.put_tenant", put_tenant)
    with capture_logs() as lines:
        problem = ask("PUT", "/admin/tenants/acme", role="admin", status=409, json={"concurrent_max": 1})
    assert (problem["code"], problem["detail"][-9:]) == ("conflict", "try again")
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["a change collided with another one"]
