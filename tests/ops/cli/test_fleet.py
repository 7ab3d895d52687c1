"""Regions, GPU types, endpoints, nodes and instances on the command line."""

import gzip
import re
import time
from pathlib import Path
from typing import Any

import pytest

from controlplane.policies.lifecycle import InstanceState
from controlplane.settings import Settings
from controlplane.store.alias_tables import Alias
from controlplane.store.instances import add_instance, set_desired
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from controlplane.store.tables import Desired, EndpointRow, Instance, Model
from dataplane.protocol.host_states import HostState
from dataplane.protocol.joining import SlotSpec
from dataplane.protocol.messages import Heartbeat
from ops.client import drains
from ops.client.api import Api
from tests.controlplane.world import HANGS_S
from tests.ops.cli.running import GIB, Run, join
from tests.ops.local.test_checkpoints import write_checkpoint

ON_NODE: dict[str, Any] = {
    "model": "m", "region": "us-east", "gpu_type": "H800", "node": "n-1", "slot": 0, "gpus": 1,
}  # fmt: skip


def test_a_fleet_is_registered_and_listed(served: Run, tmp_path: Path, database: Database) -> None:
    assert served("region", "add", "us-east").status == 0
    assert served("region", "add", "us-west", "--json").json["position"] == 1
    assert "us-west" in served("region", "list").out
    assert served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5).status == 0
    assert "80 GiB" in served("gpu", "list").out
    folder = write_checkpoint(tmp_path / "tiny")
    made = served(
        *("model", "add", "org/tiny", "--path", folder, "--tokens-per-s", "H800=1200", "--json"),
        *("--region", "us-east", "--region", "us-west", "--max", 3),
    ).json
    assert made["model"]["weights_bytes"] == 96
    assert [profile["tokens_per_s"] for profile in made["profiles"]] == [1200]
    assert [endpoint["region"] for endpoint in made["endpoints"]] == ["us-east", "us-west"]
    assert "LlamaForCausalLM" in served("model", "show", "org/tiny").out
    assert served("endpoint", "set", "org/tiny", "us-east", "--min", 1, "--max", 2, "--json").json["instances_max"] == 2
    assert [row["instances_max"] for row in served("endpoint", "list", "--json").json["data"]] == [2, 3]
    join(database, "n-1", SlotSpec(gpus=8, memory_bytes=GIB), SlotSpec(gpus=8, memory_bytes=GIB, workers=8))
    assert "draining" in served("node", "drain", "n-1").out
    assert served("node", "show", "n-1", "--json").json["draining"] is True
    assert "8 GPUs with 1 GiB, 8 GPUs in 8 workers with 1 GiB" in served("node", "show", "n-1").out
    assert "0.0.1 (not the gateway's)" in served("node", "show", "n-1").out
    assert "0.0.1" in served("node", "list").out
    assert served("node", "undrain", "n-1", "--json").json["draining"] is False
    assert "n-1" in served("node", "list").out
    assert served("instance", "list", "--json").json["data"] == []
    status = served("status").out
    assert "0 of 1" in status
    assert served("status", "--json").json["models"] == 1


def test_the_hosts_of_a_slot_are_shown(
    fleet: Run, database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(settings), "heartbeat_stale_s", HANGS_S)
    join(database, "n-1", SlotSpec(gpus=6, memory_bytes=GIB, hosts=3))
    assert "3, not known which are there" in fleet("node", "list").out
    silent = HostState(slot=0, host=2, connected=False, refusal="it has Tidepool 0.1")
    others = (HostState(slot=0, host=1, connected=True, hostname="second", silent_s=0.2), silent)
    beat = Heartbeat(node="n-1", boot_id="b", generation=0, instances=(), hosts=others)
    live = LiveStore(settings)
    live.write_heartbeat(beat, region="us-east", gpu_type="H800", url="http://n")
    live.close()
    assert "3, without 2 of slot 0" in fleet("node", "list").out
    [listed] = fleet("node", "list", "--json").json["data"]
    assert [host["connected"] for host in listed["other_hosts"]] == [True, False]
    shown = fleet("node", "show", "n-1").out
    assert "6 GPUs of 3 hosts with 1 GiB" in shown
    assert re.search(r"second\W+yes\W+0\.2", shown), shown
    assert "it has Tidepool 0.1" in shown
    monkeypatch.setitem(vars(settings), "heartbeat_stale_s", -1.0)
    assert "3, not known which are there" in fleet("node", "list").out


@pytest.mark.parametrize(
    ("flags", "word"),
    [({"alive": False, "draining": True}, "silent"), ({"leaving": True, "draining": True}, "leaving"),
     ({"draining": True}, "draining"), ({}, "alive")],
)  # fmt: skip
def test_nodes_of_a_gateway_of_the_release_before_are_shown(
    fleet: Run, database: Database, monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool], word: str
) -> None:
    def get_without_state(api: Api, path: str, **query: Any) -> Any:
        answer = get(api, path, **query)
        for node in answer["data"] if path == "/admin/nodes" else [answer]:
            del node["state"]
            node.update({"alive": True, "draining": False, "leaving": False} | flags)
        return answer

    join(database, "n-1")
    get = Api.get
    monkeypatch.setattr(Api, "get", get_without_state)
    for shown in (fleet("node", "list"), fleet("node", "show", "n-1")):
        assert shown.status == 0, shown.err
        assert word in shown.out.split()


def test_a_name_is_one_name_whatever_is_in_it(fleet: Run, database: Database) -> None:
    join(database, "n-1")
    join(database, "n-1#b ?%23")
    assert fleet("node", "drain", "n-1#b ?%23", "--json").json["name"] == "n-1#b ?%23"
    assert fleet("node", "show", "n-1#b ?%23", "--json").json["draining"] is True
    assert fleet("node", "show", "n-1", "--json").json["draining"] is False
    assert "(400)" in fleet("region", "delete", "us-east#other").err
    assert "(400)" in fleet("tenant", "set", "team?x", "--requests-per-minute", 5).err
    assert fleet("alias", "put", "org/m", "m").status == 0
    assert "alias org/m is deleted" in fleet("alias", "delete", "org/m").out
    for *command, name, collection in (
        ("tenant", "show", "../keys", "tenants"),
        ("tenant", "show", ".", "tenants"),
        ("node", "show", "../regions/us-east", "nodes"),
        ("node", "delete", "n-1/layout", "nodes"),
        ("model", "show", "../nodes", "models"),
        ("region", "delete", "", "regions"),
    ):
        refused = fleet(*command, name)
        assert refused.err == f"error: '{name}' cannot be a name or an id in /admin/{collection}\n"


@pytest.mark.parametrize("name", ["org//m", "org/"])
def test_a_name_with_an_empty_part_is_refused_and_one_of_an_earlier_release_is_kept_until_it_is_deleted(
    fleet: Run, database: Database, name: str
) -> None:
    refused = fleet("alias", "put", name, "m")
    assert f"name: '{name}': none of the parts that '/' separates may be empty, '.' or '..' (400)" in refused.err
    with database.transaction() as session:
        session.add(Alias(name=name))
        session.add(Model(name=f"x{name}", path="/x", architecture="L", weights_bytes=1, kv_bytes_per_token=1,
                          context_tokens=9))  # fmt: skip
    assert fleet("alias", "put", name, "m").status == 0
    assert fleet("alias", "show", name, "--json").json["targets"] == {"m": 1}
    assert fleet("alias", "delete", name).status == 0
    assert fleet("model", "show", f"x{name}").status == 0
    assert fleet("model", "delete", f"x{name}", "--yes").status == 0


def test_a_node_is_regrouped(fleet: Run, database: Database) -> None:
    join(database, "n-1", SlotSpec(gpus=4, memory_bytes=4 * GIB, number=0), regroups=True)
    assert "node n-1 is regrouped as its slots get empty" in fleet("node", "layout", "n-1", "2,1,1").out
    assert "2, 1, 1 GPUs, since" in fleet("node", "show", "n-1").out
    assert fleet("node", "show", "n-1", "--json").json["layout"] == [2, 1, 1]
    assert "node n-1 has these slots" in fleet("node", "layout", "n-1", "4").out
    assert "slots wanted" not in fleet("node", "show", "n-1").out
    assert "held by an operator" in fleet("node", "show", "n-1").out
    assert "node n-1 keeps its slots until a plan chooses others" in fleet("node", "layout", "n-1", "--by-plans").out
    assert "left to plans" in fleet("node", "show", "n-1").out
    assert "either LAYOUT or --by-plans is needed" in fleet("node", "layout", "n-1").err
    for layout, said in (("2,x", "is no list of numbers"), ("3,1", "a slot has 1, 2, 4, 8, ... GPUs, not 3")):
        failed = fleet("node", "layout", "n-1", layout)
        assert failed.status != 0
        assert said in " ".join(failed.err.split())


def test_what_is_used_is_not_deleted_and_drain_empties_it_first(
    fleet: Run, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(database, "n-1")
    with database.transaction() as session:
        instance_id = add_instance(session, **ON_NODE).id
    for words, what in (
        (f"1 x instance ({instance_id})", ("endpoint", "delete", "m", "us-east")),
        ("1 x endpoint (us-east)", ("model", "delete", "m")),
        ("1 x node (n-1)", ("gpu", "delete", "H800")),
        ("1 x node (n-1)", ("region", "delete", "us-east")),
        (f"1 x instance ({instance_id})", ("node", "delete", "n-1")),
    ):
        refused = fleet(*what)
        assert (refused.status, words in refused.err) == (1, True), refused.err

    def drained(_: float) -> None:
        """What scaling and the node do meanwhile."""
        with database.transaction() as session:
            assert session.get_one(EndpointRow, ("m", "us-east")).instances_max == 0
            set_desired(session, [instance_id], Desired.STOPPED)

    monkeypatch.setattr(drains, "sleep", drained)
    gone = fleet("model", "delete", "m", "--drain")
    assert (gone.out, gone.err) == ("model m is deleted\n", "m in us-east: 1 instance left\n")
    assert "is not registered" in fleet("model", "delete", "m").err
    assert fleet("node", "delete", "n-1", "--drain", "--json").json["name"] == "n-1"
    assert fleet("gpu", "delete", "H800").out == "GPU type H800 is deleted\n"
    assert fleet("region", "delete", "us-east").out == "region us-east is deleted\n"
    assert fleet("status", "--json").json["regions"] == []


def test_pins(fleet: Run) -> None:
    until = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(time.time() + 86_400))
    add = ("pin", "add", "m", "us-east", "--instances", 4)
    assert "launch" not in fleet(*add, "--until", until, "--note", "launch week").out
    row = fleet("pin", "list", "--json").json["data"][0]
    assert (row["instances"], row["note"], row["until"][:16]) == (4, "launch week", until[:16])
    assert "launch week" in fleet("pin", "list").out
    assert "(409)" in fleet(*add, "--until", until).err
    assert fleet(*add, "--until", "friday").status == 2
    assert "not in the future" in fleet(*add, "--until", "2020-01-01").err
    assert "is pinned no more" in fleet("pin", "remove", row["id"][:-1]).out
    assert fleet("pin", "list").out == "Pins: none\n"
    assert row["id"] in fleet("pin", "list", "--all").out


def test_spot(fleet: Run, database: Database) -> None:
    assert fleet("spot", "list").out == "Spot instances: none\n"
    join(database, "n-1")
    with database.transaction() as session:
        made = add_instance(session, **ON_NODE)
        session.flush()
        set_desired(session, [made.id], Desired.SPOT)
        session.get_one(Instance, made.id).observed = InstanceState.SPOT
        held = made.id
    lease = ("spot", "lease", held, "--holder", "lab")
    assert f"{held} is leased to lab until" in fleet(*lease).out
    row = fleet("spot", "list", "--json").json["data"][0]
    assert (row["instance_id"], row["lease"]["holder"], row["ready"]) == (held, "lab", True)
    assert "lab" in fleet("spot", "list").out
    assert "(409)" in fleet(*lease).err
    assert "must be from 60 to 86400" in fleet(*lease, "--duration-s", 5).err
    assert fleet("spot", "lease", held).status == 2
    assert fleet("spot", "return", held, "--json").json["end_reason"] == "returned"
    assert "nobody leases" in fleet("spot", "return", held).err
    assert fleet(*lease, "--duration-s", 60, "--json").json["holder"] == "lab"
    assert fleet("spot", "return", held).out == f"{held} is returned\n"


def test_demand(fleet: Run, tmp_path: Path) -> None:
    lines = ["start_s,region,model,tokens_per_s", *(f"{60 * i},us-east,m,{i}" for i in range(120))]
    plain, packed = tmp_path / "week.csv", tmp_path / "week.csv.gz"
    plain.write_text("\n".join(lines))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert "120 minutes of 1 endpoints" in fleet("demand", "import", plain).out
    assert fleet("demand", "import", packed, "--json").json["rows"] == 120
    shown = fleet("demand", "show", "m", "us-east").out
    assert "89.5" in shown
    assert "119" in shown
    assert len(fleet("demand", "show", "m", "us-east", "--since-s", 60, "--json").json["data"]) == 119
    plain.write_text(plain.read_text() + "\n61,us-east,m,1")
    assert fleet("demand", "import", plain).err.endswith(
        "error: line 122: start_s: must be a multiple of 60, is 61 (400)\n"
    )
    packed.write_bytes(packed.read_bytes()[:-9])
    assert "cannot be read" in fleet("demand", "import", packed).err
    assert "none" in fleet("forecast", "list").out
