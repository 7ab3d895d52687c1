"""Usage over the API: what a gateway answered is counted once, by its tenant, and can be asked for."""

import csv
from datetime import UTC, datetime
from io import StringIO
from typing import Any

import httpx2 as httpx
from fastapi.testclient import TestClient

from controlplane.store.session import Database
from controlplane.store.tables import Role
from controlplane.store.usage import COUNTED, Usage, UsageKey, add_batch_usage, put_usage, read_usage
from tests.controlplane.api.gateway import running_gateway
from tests.controlplane.world import FakeAgent, World, until


def test_answers_of_a_gateway_count_for_their_tenant(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        for _ in range(2):
            gateway.chat()
        gateway.chat(stream=True)
        gateway.chat(404, model="unknown")
        secret = world.key(Role.VIEWER)

        def usage(status: int = 200, **query: Any) -> Any:
            headers = {"Authorization": f"Bearer {secret}"}
            answer = httpx.get(f"{gateway.url}/admin/usage", params=query, headers=headers)
            assert answer.status_code == status, answer.text
            return answer.json()

        def counted() -> bool:
            gateway.state.usage.flush()
            return [row["requests"] for row in usage(by="tenant")["data"]] == [3]

        until(counted)
        [row] = usage(by=["model", "tenant", "tier", "day"])["data"]
        assert (row["tenant"], row["model"], row["tier"], row["hour"]) == ("acme", "tide", "IW-N", None)
        assert (row["requests"], row["failed"], row["input_tokens"], row["output_tokens"]) == (3, 0, 21, 9)
        assert row["day"].endswith("T00:00:00Z")
        assert usage(tenant="blue")["data"] == []
        assert usage(400, by="colour")["param"] == "by.0"


def test_prompts_count_once_each_whether_or_not_their_answers_end(world: World) -> None:
    agent = FakeAgent()
    ever: dict[str, Any] = {"since": datetime(2020, 1, 1, tzinfo=UTC), "until": None}
    with running_gateway(world, agent) as gateway:

        def counted() -> tuple[int, ...]:
            """Requests, failed ones, and tokens of prompts and answers."""
            gateway.state.usage.flush()
            with world.database.transaction() as session:
                rows = read_usage(session, by=["tenant"], **ever, tenant=None, model=None, after=0, limit=2)
            return tuple(rows[0][name] for name in COUNTED) if rows else ()

        gateway.client.completions.create(model="tide", prompt=["a", "b"], n=2)
        until(lambda: counted()[:2] == (1, 0))
        assert counted()[2:] == (2 * 7, 4 * 3)
        agent.then = "hang later"
        body = {"model": "tide", "prompt": "x", "stream": True}
        with gateway.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        until(lambda: counted()[:2] == (2, 1))
        assert counted()[2:] == (3 * 7, 4 * 3 + 2)
        agent.then = "die later"
        gateway.chat(502)
        until(lambda: counted()[:2] == (3, 2))
        assert counted()[2:] == (4 * 7, 4 * 3 + 2 * 2)


def test_more_is_written_than_one_statement_has_parameters(database: Database) -> None:
    """Postgres takes 65,535; a row has nine. Each write replaces the process's one before, or adds to it."""
    hour = datetime(2026, 11, 23, tzinfo=UTC)
    counts = {UsageKey(hour, "acme", f"m{n}", "IW-N"): Usage(requests=1, input_tokens=n) for n in range(8000)}
    for write in (lambda session: put_usage(session, "w", counts), lambda session: add_batch_usage(session, counts)):
        for _ in range(2):
            with database.transaction() as session:
                write(session)
    with database.transaction() as session:
        [whole] = read_usage(session, by=["tenant"], since=hour, until=None, tenant=None, model=None, after=0, limit=2)
    assert (whole["requests"], whole["input_tokens"]) == (3 * 8000, 3 * sum(range(8000)))


def test_usage_is_exported_as_csv_that_no_spreadsheet_takes_for_formulas(
    api: TestClient, secrets: dict[str, str], database: Database
) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    models = ["tide", "=HYPERLINK(1)", "+1", "-1", "@sum", "\tx", 'a,"b"']
    with database.transaction() as session:
        put_usage(session, "w", {UsageKey(hour, "acme", name, "IW-N"): Usage(requests=2) for name in models})
    headers = {"Authorization": f"Bearer {secrets['viewer']}"}
    answer = api.get("/admin/usage.csv", params={"by": ["model", "hour"]}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(StringIO(answer.text, newline="")))
    assert {row["model"].removeprefix("'") for row in rows} == set(models)
    assert not [row["model"] for row in rows if row["model"][0] in "=+-@\t\r"]
    assert {(row["requests"], row["hour"]) for row in rows} == {("2", hour.isoformat())}
