"""Stored responses: whose they are, and the conversations that they make."""

from typing import Any

import pytest

from controlplane.errors import InvalidValueError, NotFoundError, PreviousResponseError
from controlplane.store.responses import (
    StoredResponse,
    add_response,
    conversation_before,
    delete_response,
    get_response,
)
from controlplane.store.session import Database


def stored(name: str, previous: str | None = None, text: str = "hi") -> StoredResponse:
    response = {"id": name, "previous_response_id": previous, "status": "completed", "output": [{"id": f"out_{name}"}]}
    return StoredResponse(response=response, input=[{"id": f"in_{name}", "text": text}])


def put(database: Database, *chain: str, tenant: str = "acme") -> None:
    """Responses that follow each other."""
    for previous, name in zip((None, *chain), chain, strict=False):
        with database.transaction() as session:
            add_response(session, stored(name, previous), tenant=tenant)


def before(database: Database, name: str, *, tenant: str = "acme", **limits: int) -> list[str]:
    limits = {"count_max": 10, "bytes_max": 10_000} | limits
    with database.transaction() as session:
        found: list[Any] = conversation_before(session, name, tenant=tenant, **limits)
    return [item["id"] for each in found for item in each.items]


def test_what_is_stored_comes_back_word_for_word(database: Database) -> None:
    given = stored("resp_0197", text="nul \0, \U0001f30a")
    with database.transaction() as session:
        add_response(session, given, tenant="acme")
    with database.transaction() as session:
        assert get_response(session, given.response["id"], tenant="acme") == given


def test_other_tenants_see_nothing(database: Database) -> None:
    put(database, "a")
    with database.transaction() as session:
        with pytest.raises(NotFoundError):
            get_response(session, "a", tenant="other")
        with pytest.raises(NotFoundError):
            delete_response(session, "a", tenant="other")
    with pytest.raises(PreviousResponseError):
        before(database, "a", tenant="other")
    put(database, "b", tenant="other")
    with database.transaction() as session:
        add_response(session, stored("c", previous="b"), tenant="acme")
    with pytest.raises(PreviousResponseError, match="'b'"):
        before(database, "c")


def test_a_conversation_is_read_from_its_beginning(database: Database) -> None:
    put(database, "a", "b", "c")
    assert before(database, "c") == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]
    assert before(database, "b") == ["in_a", "out_a", "in_b", "out_b"]


def test_a_conversation_with_a_gap_cannot_be_continued(database: Database) -> None:
    put(database, "a", "b", "c")
    with database.transaction() as session:
        delete_response(session, "a", tenant="acme")
    with pytest.raises(PreviousResponseError, match="'a'"):
        before(database, "c")
    with pytest.raises(PreviousResponseError, match="'nobody'"):
        before(database, "nobody")


def test_conversations_are_limited(database: Database) -> None:
    put(database, "a", "b", "c")
    assert len(before(database, "c", count_max=3)) == 6
    for limits in ({"count_max": 2}, {"bytes_max": 200}):
        with pytest.raises(InvalidValueError, match="begin a new one") as refused:
            before(database, "c", **limits)
        assert refused.value.param == "previous_response_id"
