"""How many round trips to Postgres requests take: a gateway in another region than the primary's waits for each."""

import json
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from pydantic import SecretStr

from controlplane.settings import Settings
from tests.controlplane.api.conftest import Ask
from tests.controlplane.trips import TripCounter

LINE = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "llama", "messages": []}}


@pytest.fixture
def trips(database_url: str) -> Iterator[TripCounter]:
    counter = TripCounter(database_url)
    yield counter
    counter.close()


@pytest.fixture
def settings(settings: Settings, trips: TripCounter) -> Settings:
    return settings.model_copy(update={"database_url": SecretStr(trips.at)})


class Client:
    """What is asked of the gateway, each time for something new."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._numbers = count()

    def upload(self) -> str:
        file = ("in.jsonl", json.dumps(LINE).encode(), "application/jsonl")
        given = {"files": {"file": file}, "data": {"purpose": "batch"}}
        return str(self._ask("POST", "/v1/files", role="client", **given)["id"])

    def create(self, file_id: str) -> str:
        about = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self._ask("POST", "/v1/batches", role="client", json=about)["id"])

    def cancel(self, batch_id: str) -> None:
        self._ask("POST", f"/v1/batches/{batch_id}/cancel", role="client")

    def delete(self, file_id: str) -> None:
        self._ask("DELETE", f"/v1/files/{file_id}", role="client")

    def make_key(self, *, once: bool = False) -> str:
        number = next(self._numbers)
        headers = {"Idempotency-Key": f"once-{number}"} if once else {}
        key = {"name": f"key-{number}", "role": "client", "expires_in_days": 1}
        return str(self._ask("POST", "/admin/keys", role="admin", status=201, json=key, headers=headers)["id"])

    def revoke(self, key_id: str) -> None:
        self._ask("DELETE", f"/admin/keys/{key_id}", role="admin")

    def limit_tenant(self) -> None:
        limits = {"requests_per_minute": 1 + next(self._numbers)}
        self._ask("PUT", "/admin/tenants/acme", role="admin", json=limits)


@pytest.fixture
def client(ask: Ask) -> Client:
    return Client(ask)


def test_a_batch_is_accepted_in_two_trips(client: Client, trips: TripCounter) -> None:
    """One writes the file, one the batch; each is its own commit."""
    assert trips.least(client.upload) == 1
    file_id = client.upload()
    assert trips.least(lambda: client.create(file_id)) == 1
    assert trips.least(each(client.cancel, lambda: client.create(file_id))) <= 6
    assert trips.least(each(client.delete, client.upload)) == 1


def test_a_key_takes_two_or_three_trips(client: Client, trips: TripCounter) -> None:
    """The last one is that of the audit and the commit."""
    assert trips.least(client.make_key) == 2
    assert trips.least(lambda: client.make_key(once=True)) == 3, "the claim of the request's key is one more"
    assert trips.least(each(client.revoke, client.make_key)) == 3
    assert trips.least(client.limit_tenant) <= 5


def each(use: Callable[[str], None], made: Callable[[], str], *, rounds: int = 6) -> Callable[[], None]:
    """A call that uses one of several things up, which were made before."""
    left = [made() for _ in range(rounds)]
    return lambda: use(left.pop())
