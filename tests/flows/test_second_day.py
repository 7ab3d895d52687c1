"""The operator's second day, on processes that run apart: an upgrade, a model that cannot load, new keys, a restore."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.client.home import password
from ops.local.tiny_models import build_tiny_models
from ops.local.wheels import postgres_binary
from tests.flows.machines import Machine, environment, start_servers, why_not, wired
from tests.flows.waiting import wait_until

pytestmark = pytest.mark.slow
ADDRESS = "10.77.0.1"
BEFORE = "0012"
"""A revision of the schema that an earlier version had."""
START = "tidepool api & tidepool dispatcher & tidepool worker & tidepool forecaster & tidepool beat & tidepool agent &"
STOP = "kill $(jobs -p); wait"
NODE = {
    "TIDEPOOL_AGENT_NODE": "node-1",
    "TIDEPOOL_AGENT_REGION": "us-east",
    "TIDEPOOL_AGENT_GPU_TYPE": "H100",
    "TIDEPOOL_AGENT_SLOTS": '[{"gpus": 4, "memory_bytes": 67108864}]',
    "TIDEPOOL_AGENT_HANDOVER_MAX_S": "0",
    "TIDEPOOL_NODE_KEYS_UNBOUND": "true",
    "TIDEPOOL_SCALE_FAILED_PATIENCE_S": "0.5",
}
BATCH = {
    "custom_id": "r1",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "good", "prompt": "tide", "max_tokens": 4},
}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine with PostgreSQL and Redis, and the tools of PostgreSQL on its PATH."""
    if reason := why_not():
        pytest.skip(reason)
    tools = postgres_binary("pg_dump").parent
    shared = environment(tmp_path) | NODE | {"TIDEPOOL_HOME": str(tmp_path / "home")}
    shared["PATH"] = f"{tools}:{shared['PATH']}"  # of the server's version, before any other
    with (
        wired([ADDRESS]) as namespaces,
        Machine(namespaces[ADDRESS], tmp_path, shared, tmp_path / "machine.log") as made,
    ):
        servers = tmp_path / "servers"
        start_servers(made, servers)
        made.run(
            f"export TIDEPOOL_DATABASE_URL=postgres://tidepool:{password(servers, 'postgres')}@{ADDRESS}/tidepool\n"
            f"export TIDEPOOL_REDIS_URL=redis://:{password(servers, 'valkey')}@{ADDRESS}"
        )
        yield made


class Operator:
    """What an operator and a client type on the machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def asked(self, *words: str) -> Any:
        """A command that prints JSON; None: it failed."""
        printed = self._machine.run(f"tidepool {' '.join(words)} --json || true")
        return json.loads(printed) if printed.strip() else None

    def status_of(self, path: str, *, key: str, body: str | None = None) -> int:
        """The HTTP status that a client with this key gets."""
        data = f"-H 'Content-Type: application/json' -d '{body}'" if body else ""
        what = f"curl -s -o /dev/null -w '%{{http_code}}' http://127.0.0.1:8080{path} -H 'Authorization: Bearer {key}'"
        return int(self._machine.run(f"{what} {data} || true").strip())

    def is_served(self, key: str) -> bool:
        body = json.dumps({"model": "good", "prompt": "tide", "max_tokens": 4})
        return self.status_of("/v1/completions", key=key, body=body) == 200

    def secret(self, role: str) -> str:
        return self._machine.run(f"tidepool key secret {role}").strip()

    def instances(self, model: str) -> list[str]:
        rows = self.asked("instance", "list")["data"]
        return [row["observed"] for row in rows if row["model"] == model]


def sql(machine: Machine, *statements: str, database: str = "tidepool") -> None:
    """Run statements in a database of the server, as another program would."""
    program = f"""import os, psycopg
url = os.environ["TIDEPOOL_DATABASE_URL"].rpartition("/")[0] + "/{database}"
with psycopg.connect(url, autocommit=True) as connection:
    for statement in {list(statements)!r}:
        connection.execute(statement)
"""
    machine.run(f"{sys.executable} - <<'END'\n{program}END")


def test_upgrade_failing_model_new_keys_and_restore(machine: Machine, tmp_path: Path) -> None:
    operator = Operator(machine)
    good = build_tiny_models(tmp_path / "models", ["tiny-llama"])[0].path.rename(tmp_path / "good")
    broken = good.with_name("bad")
    shutil.copytree(good, broken)

    # An upgrade: the database is of an earlier version, and has a row that must survive.
    machine.run(f"tidepool migrate {BEFORE}")
    sql(machine, "INSERT INTO regions (name, position) VALUES ('us-east', 0)")
    said = machine.run("tidepool dispatcher 2>&1 && echo it started || true")
    assert "tidepool migrate" in said
    assert "it started" not in said
    machine.run("tidepool init --migrate")
    machine.run("export TIDEPOOL_NODE_KEY=$(tidepool key secret node)")
    machine.run(f"export TIDEPOOL_AGENT_NODE_KEY=$TIDEPOOL_NODE_KEY\n{START}")
    client = operator.secret("client")
    wait_until(lambda: operator.status_of("/readyz", key=client) == 200, "a gateway that is ready")
    assert [row["name"] for row in operator.asked("region", "list")["data"]] == ["us-east"]

    # A model that cannot load keeps neither the others nor all GPUs.
    machine.run("tidepool gpu add H100 --memory-gib 80 --cost-per-hour 2.5")
    for path, fewest in ((broken, 0), (good, 1)):
        limits = f"--region us-east --min {fewest} --max 4"
        machine.run(f"tidepool model add {path.name} --path {path} --tokens-per-s H100=2500 {limits}")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    machine.run("tidepool endpoint set bad us-east --min 1 --max 4")
    wait_until(lambda: operator.is_served(client), "an answer of the good model")
    wait_until(lambda: "failed" in operator.instances("bad"), "the bad model has failed")
    for _ in range(8):  # each look takes as long as a turn of scaling
        assert len(operator.instances("bad")) <= 2
    assert operator.is_served(client)

    # A batch ends, and everything is backed up while it runs.
    (tmp_path / "in.jsonl").write_text(json.dumps(BATCH) + "\n")
    machine.run(f"tidepool --key {client} batch submit in.jsonl -o before.jsonl")
    before = (tmp_path / "before.jsonl").read_text()
    assert json.loads(before)["response"]["status_code"] == 200
    machine.run(f"tidepool backup {tmp_path / 'backup'}")

    # New keys: the old ones end, and the command line goes on with the new.
    keys = {row["name"]: row["id"] for row in operator.asked("key", "list")["data"]}
    for name in ("bootstrap-client", "bootstrap-admin"):
        machine.run(f"tidepool key rotate {keys[name]} --overlap 0s")
    rotated = operator.secret("client")
    assert rotated != client
    wait_until(lambda: operator.status_of("/v1/models", key=client) == 401, "the old key is refused")
    assert operator.is_served(rotated)
    assert operator.asked("status") is not None, "the new admin key is in keys.json"

    # The disk is lost: everything from the backup, which knows nothing of the new keys.
    machine.run(STOP)
    sql(machine, "DROP DATABASE tidepool", "CREATE DATABASE tidepool", database="postgres")
    flush = 'import os, redis; redis.Redis.from_url(os.environ["TIDEPOOL_REDIS_URL"]).flushall()'
    machine.run(f"{sys.executable} -c '{flush}'")
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").mkdir()
    machine.run(f"tidepool restore {tmp_path / 'backup'}")
    machine.run(START)
    assert operator.secret("client") == client
    wait_until(lambda: operator.is_served(client), "an answer after the restore")
    (batch,) = operator.asked("--key", client, "batch", "list")["data"]
    machine.run(f"tidepool --key {client} batch output {batch['id']} -o after.jsonl")
    assert (tmp_path / "after.jsonl").read_text() == before
