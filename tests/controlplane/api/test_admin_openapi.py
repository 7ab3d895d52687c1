"""The OpenAPI document of the admin API tells the truth about its failures."""

from typing import Any

import pytest
from fastapi import FastAPI

from controlplane.api import admin


@pytest.fixture(scope="module")
def operations() -> dict[str, dict[str, Any]]:
    app = FastAPI()
    app.include_router(admin.router)
    return {
        f"{method} {path}": operation
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
    }


def test_validation_errors_are_documented_as_what_they_are(operations: dict[str, dict[str, Any]]) -> None:
    for operation in operations.values():
        assert "422" not in operation["responses"]
        example = operation["responses"]["400"]["content"]["application/problem+json"]["example"]
        assert example["status"] == 400


def test_every_post_documents_its_idempotency_key(operations: dict[str, dict[str, Any]]) -> None:
    for name, operation in operations.items():
        names = [parameter["name"] for parameter in operation.get("parameters", [])]
        assert names.count("Idempotency-Key") == name.startswith("post"), name


def test_every_operation_says_what_it_does(operations: dict[str, dict[str, Any]]) -> None:
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(set(ids)) == len(ids)
    for operation in operations.values():
        assert operation["operationId"].startswith("admin_")
        assert operation["summary"]
        assert operation["description"]
        assert operation["security"]
