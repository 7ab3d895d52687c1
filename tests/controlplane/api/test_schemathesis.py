"""Every operation of the OpenAPI document under generated requests: no 5xx that is not promised, no status, content
type or body that the document does not tell of.
"""

from collections.abc import Iterator

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from controlplane.api.app import make_app
from controlplane.settings import Settings
from controlplane.store.keys import make_key
from controlplane.store.session import Database
from controlplane.store.tables import Role
from tests.controlplane.world import served

EXAMPLES = 6
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
PROMISED = {502, 503}
"""Said where a node or a server is away; there is no node here, and no task queue."""
PARTS = ("/v1", "/admin", "/node", "/")
ENDLESS = frozenset({"/admin/live"})
"""Streams that end with their reader."""


@pytest.fixture
def app(settings: Settings) -> FastAPI:
    return make_app(settings)


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    with served(app) as url:
        yield url


def key(database: Database, part: str) -> str:
    role = {"/admin": Role.ADMIN, "/node": Role.NODE}.get(part, Role.CLIENT)
    with database.transaction() as session:
        return make_key(session, name="fuzz", role=role, tenant="acme").secret


@pytest.mark.parametrize(
    "part", ["/", "/node", *(pytest.param(part, marks=pytest.mark.slow) for part in ("/v1", "/admin"))]
)
def test_the_document_is_kept(app: FastAPI, url: str, database: Database, part: str) -> None:
    headers = {"Authorization": f"Bearer {key(database, part)}"}
    schema = schemathesis.openapi.from_dict(app.openapi())
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in ENDLESS or next(each for each in PARTS if operation.path.startswith(each)) != part:
            continue
        tried += 1

        @hypothesis(
            max_examples=EXAMPLES,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            answer = case.call(base_url=url, headers=headers, timeout=300)
            assert answer.status_code < 500 or answer.status_code in PROMISED, (case.as_curl_command(), answer.text)
            case.validate_response(answer, checks=CHECKS)

        check()
    assert tried
