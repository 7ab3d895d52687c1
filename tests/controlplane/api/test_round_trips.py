"""How many round trips to Postgres requests take: a gateway in another region than the primary's waits for each."""

import json
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from controlplane.settings import Settings
from tests.controlplane.api.conftest import Ask
from tests.controlplane.trips import TripCounter


@pytest.fixture
def trips(database_url: str) -> Iterator[TripCounter]:
    counter = TripCounter(database_url)
    yield counter
    counter.close()


@pytest.fixture
def settings(settings: Settings, trips: TripCounter) -> Settings:
    return settings.model_copy(update={"database_url": SecretStr(trips.at)})

def test_show(ask, trips):
    line = json.dumps({"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"llama","messages":[]}})
    def upload():
        return ask("POST","/v1/files",role="client",files={"file":("a.jsonl",line.encode(),"application/jsonl")},data={"purpose":"batch"})["id"]
    file_id = upload()
    def create():
        return ask("POST","/v1/batches",role="client",json={"input_file_id":file_id,"endpoint":"/v1/chat/completions","completion_window":"24h"})["id"]
    n = iter(range(1000))
    def make(**headers):
        return ask("POST","/admin/keys",role="admin",status=201,json={"name":f"k{next(n)}","role":"client"},headers=headers)["id"]
    made=[make() for _ in range(20)]
    def revoke():
        ask("DELETE",f"/admin/keys/{made.pop()}",role="admin")
    batches=[create() for _ in range(20)]
    print("upload", trips.least(upload))
    print("create", trips.least(create))
    print("key", trips.least(make))
    print("key idempotent", trips.least(lambda: make(**{"Idempotency-Key": f"x{next(n)}"})))
    print("revoke", trips.least(revoke))
    print("cancel", trips.least(lambda: ask("POST", f"/v1/batches/{batches.pop()}/cancel", role="client")))
    print("get batch", trips.least(lambda: ask("GET", f"/v1/batches/{batches[0]}", role="client")))
    print("get file", trips.least(lambda: ask("GET", f"/v1/files/{file_id}", role="client")))
    print("region", trips.least(lambda: ask("PUT", f"/admin/regions/r{next(n)}")))
    print("delete file", trips.least(lambda: ask("DELETE", f"/v1/files/{upload()}", role="client")))
    print("tenant", trips.least(lambda: ask("PUT", "/admin/tenants/acme", json={"requests_per_minute": next(n)+1}, role="admin")))
