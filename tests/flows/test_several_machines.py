"""The walk-through of several machines in `ops/docs/deploy.md`, with a network namespace as each machine."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ops.client.home import password
from ops.local.tiny_models import build_tiny_models
from tests.flows.machines import Machine, documented_lines, environment, filled, start_servers, why_not, wired
from tests.flows.waiting import wait_until

ADDRESSES = {"control-1": "10.77.0.1", "gateway-2": "10.77.0.2", "node-1": "10.77.0.3", "client": "10.77.0.4"}
CPU_NODE = {"TIDEPOOL_AGENT_SLOTS": '[{"gpus": 1, "memory_bytes": 67108864}]'}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """The machines by name, in one folder; PostgreSQL and Redis run on the first."""
    if reason := why_not():
        pytest.skip(reason)
    shared = environment(tmp_path)
    with ExitStack() as stack:
        namespaces = stack.enter_context(wired(list(ADDRESSES.values())))
        made = {}
        for name, address in ADDRESSES.items():
            own = {"TIDEPOOL_HOME": str(tmp_path / name)} | (CPU_NODE if name == "node-1" else {})
            machine = Machine(namespaces[address], tmp_path, shared | own, tmp_path / f"{name}.log")
            made[name] = stack.enter_context(machine)
        start_servers(made["control-1"], tmp_path / "servers")
        yield made


def test_the_documented_lines(machines: dict[str, Machine], tmp_path: Path) -> None:
    checkpoint = build_tiny_models(tmp_path / "models", ["tiny-llama"])[0].path
    servers = tmp_path / "servers"
    words = {
        "PG_PASSWORD": password(servers, "postgres"),
        "REDIS_PASSWORD": password(servers, "valkey"),
        "CHECKPOINT": str(checkpoint),
    }
    blocks = documented_lines("Several machines")
    assert [name for name, _ in blocks] == ["control-1"] * 3 + ["node-1", "gateway-2", "client"]
    for name, lines in blocks[:-1]:
        printed = machines[name].run(filled(lines, words))
        if "# NODE_KEY" in lines:
            keys = re.findall(r"^tp-\S+$", printed, flags=re.MULTILINE)
            words |= dict(zip(("FLEET_KEY", "CLIENT_KEY", "NODE_KEY"), keys, strict=True))
    ask = filled(blocks[-1][1], words).rstrip()
    answers: list[str] = []

    def answered() -> bool:
        answers.append(machines["client"].run(f"{ask} || true"))
        return '"choices"' in answers[-1]

    wait_until(answered, "an answer from the second gateway")
    assert json.loads(answers[-1])["choices"][0]["message"]["content"]
    first = machines["client"].run(ask.replace("10.77.0.2", "10.77.0.1"))
    assert json.loads(first)["choices"][0]["message"]["content"], "and from the first"
    (node,) = json.loads(machines["control-1"].run("tidepool node list --json"))["data"]
    assert (node["name"], node["url"]) == ("node-1", "https://10.77.0.3:9000")
    assert "us-east" in machines["control-1"].run("tidepool status")
    in_clear = machines["client"].run("curl -s http://10.77.0.1:8080/livez || echo refused")
    assert "refused" in in_clear, "TLS only"

    open_ports = {name: machine.listeners() for name, machine in machines.items()}
    assert open_ports == {"control-1": {5432, 6379, 8080}, "gateway-2": {8080}, "node-1": {9000}, "client": set()}
    for name in ("gateway-2", "node-1"):
        lines = [json.loads(line) for line in machines[name].log.read_text().splitlines()]
        assert not [line for line in lines if line["level"] in {"error", "critical"}], name


@pytest.mark.slow
def test_an_agent_with_another_nodes_key_is_told_so(machines: dict[str, Machine], tmp_path: Path) -> None:
    """The same walk-through, with one mistake in it: the log of the node says which."""
    servers = tmp_path / "servers"
    words = {
        "PG_PASSWORD": password(servers, "postgres"),
        "REDIS_PASSWORD": password(servers, "valkey"),
        "NODE_KEY": "tp-node-0123456789",
        "FLEET_KEY": "tp-node-9876543210",
    }
    certificates, control, _, node, *_ = [lines for _, lines in documented_lines("Several machines")]
    machines["control-1"].run(certificates)
    machines["control-1"].run(filled(control, words))
    machines["node-1"].run(filled(node, words))
    log = machines["node-1"].log
    wait_until(lambda: "refuses this node" in log.read_text(), "a line that says why")
    (said,) = [line for line in map(json.loads, log.read_text().splitlines()) if "refuses" in line["event"]]
    assert said["status"] == 401
    assert "key" in said["reason"].lower()
    assert said["change"].endswith("tidepool key create NAME --role node --node node-1")
