"""The admin API's fleet: writing and reading it, who may, what is refused, and what the audit says."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from controlplane.store.fleet import fleet_index
from controlplane.store.joining import join_node
from controlplane.store.session import Database
from controlplane.store.tables import Model
from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.version import tidepool_version
from tests.controlplane.api.conftest import ENDPOINT, MODEL, PROFILE, Ask
from tests.controlplane.planner.pool_fleet import LATENCY

BIG = 2**63
VERSIONS = ("version", "version_differs", "engine_version")


def _index(database: Database) -> int:
    with database.transaction() as session:
        return fleet_index(session)


@pytest.fixture
def node(database: Database, fleet: None) -> str:
    join = Join(
        node="node-1",
        region="us-east",
        gpu_type="H800",
        url="http://127.0.0.1:1",
        slots=(SlotSpec(gpus=1, memory_bytes=80), SlotSpec(gpus=2, memory_bytes=160, workers=2)),
        engine="replay",
    )
    with database.transaction() as session:
        return join_node(session, join).node.name


def test_regions_take_the_last_place_unless_told(ask: Ask) -> None:
    assert ask("PUT", "/admin/regions/us-east")["position"] == 0
    assert ask("PUT", "/admin/regions/us-west", json={})["position"] == 1
    assert ask("PUT", "/admin/regions/us-west", json={"position": 7})["position"] == 7
    assert ask("GET", "/admin/regions/us-west", role="viewer")["position"] == 7
    assert [row["name"] for row in ask("GET", "/admin/regions")["data"]] == ["us-east", "us-west"]


def test_what_was_put_is_read_back(ask: Ask, fleet: None) -> None:
    assert ask("GET", "/admin/gpu-types/H800")["cost_per_hour"] == 2.5
    assert ask("GET", "/admin/gpu-types")["data"][0]["memory_bytes"] == 85_899_345_920
    model = ask("GET", "/admin/models/Qwen/Qwen3-8B", role="viewer")
    assert {name: model[name] for name in MODEL} == MODEL
    assert ask("GET", "/admin/profiles")["data"] == [PROFILE | {"owner": None}]
    endpoint = ask("GET", "/admin/endpoints")["data"][0]
    assert {name: endpoint[name] for name in ENDPOINT} == ENDPOINT
    assert ask("GET", "/admin/instances")["data"] == []


def test_a_latency_is_kept_replaced_and_taken_away(ask: Ask, fleet: None) -> None:
    assert ask("PUT", "/admin/profiles", json=PROFILE | {"latency": LATENCY})["latency"] == LATENCY
    assert ask("GET", "/admin/profiles")["data"] == [PROFILE | {"latency": LATENCY, "owner": None}]
    ask("PUT", "/admin/profiles", json=PROFILE)
    assert ask("GET", "/admin/profiles")["data"] == [PROFILE | {"owner": None}], "without one the model is never pooled"


SOURCES = (
    "https://models.example.org/tiny/",
    "https://models.example.org:8443",
    "http://127.0.0.1:8000/tiny/",
    "http://[::1]:8000/tiny/",
    "hf://Qwen/Qwen3-8B",
    "hf://Qwen/Qwen3-8B@refs/pr/1",
)


def test_a_path_may_be_a_source_elsewhere(ask: Ask) -> None:
    for source in SOURCES:
        ask("PUT", "/admin/models/m", json=MODEL | {"path": source})
        assert ask("GET", "/admin/models/m")["path"] == source


def test_saying_the_same_again_changes_nothing(ask: Ask, fleet: None, database: Database) -> None:
    index, events = _index(database), len(ask("GET", "/admin/audit", params={"limit": 100})["data"])
    ask("PUT", "/admin/models/llama", json=MODEL)
    ask("PUT", "/admin/profiles", json=PROFILE)
    ask("PUT", "/admin/endpoints", json=ENDPOINT)
    ask("PUT", "/admin/regions/us-east")
    assert _index(database) == index
    assert len(ask("GET", "/admin/audit", params={"limit": 100})["data"]) == events


def test_the_audit_holds_before_and_after(ask: Ask, fleet: None) -> None:
    ask("PUT", "/admin/endpoints", json=ENDPOINT | {"instances_max": 9})
    event = ask("GET", "/admin/audit", role="viewer", params={"limit": 1})["data"][0]
    assert (event["actor"], event["action"], event["subject"]) == ("operator", "endpoint.put", "llama|us-east")
    assert event["before"]["instances_max"] == 4
    assert event["after"]["instances_max"] == 9
    first = ask("GET", "/admin/audit", params={"limit": 100})["data"][-1]
    assert first["before"] is None
    assert first["after"]["name"] == "us-east"


ROLES = (
    ("PUT", "/admin/regions/us-east", "viewer", 403),
    ("PUT", "/admin/regions/us-east", "client", 403),
    ("PUT", "/admin/regions/us-east", "node", 403),
    ("PUT", "/admin/regions/us-east", "admin", 200),
    ("GET", "/admin/regions", "client", 403),
    ("GET", "/admin/regions", "viewer", 200),
    ("GET", "/admin/status", "viewer", 200),
    ("GET", "/admin/keys", "operator", 403),
    ("GET", "/admin/keys", "admin", 200),
    ("GET", "/admin/audit", "viewer", 200),
    ("POST", "/admin/demand", "viewer", 403),
)


def test_roles(ask: Ask) -> None:
    for method, path, role, status in ROLES:
        ask(method, path, role=role, status=status)


def test_without_a_key_nothing_is_said(api: Any, ask: Ask) -> None:
    assert api.get("/admin/regions").status_code == 401
    assert api.put("/admin/regions/mars", headers={"Authorization": "Bearer tp-admin-guess"}).status_code == 401
    assert ask("GET", "/admin/regions")["data"] == []


BAD_FIELDS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/admin/regions/US", {}, "name"),
    ("/admin/regions/-a", {}, "name"),
    ("/admin/regions/a%00b", {}, "name"),
    ("/admin/regions/" + "a" * 64, {}, "name"),
    ("/admin/regions/a", {"position": -1}, "position"),
    ("/admin/regions/a", {"position": True}, "position"),
    ("/admin/regions/a", {"place": 1}, "place"),
    ("/admin/gpu-types/a", {"cost_per_hour": 1}, "memory_bytes"),
    ("/admin/gpu-types/a", {"memory_bytes": BIG, "cost_per_hour": 1}, "memory_bytes"),
    ("/admin/gpu-types/a", {"memory_bytes": "8", "cost_per_hour": 1}, "memory_bytes"),
    ("/admin/models/m", MODEL | {"path": "models/relative"}, "path"),
    ("/admin/models/m", MODEL | {"path": "http://example.org/m/"}, "path"),
    ("/admin/models/m", MODEL | {"path": "http://localhost.example.org/m/"}, "path"),
    ("/admin/models/m", MODEL | {"path": "https:///m/"}, "path"),
    ("/admin/models/m", MODEL | {"path": "https://example.org/a\0b"}, "path"),
    ("/admin/models/m", MODEL | {"path": "https://name:secret@example.org/m/"}, "path"),
    ("/admin/models/m", MODEL | {"path": "hf://name"}, "path"),
    ("/admin/models/m", MODEL | {"path": "hf://../.."}, "path"),
    ("/admin/models/m", MODEL | {"path": "hf://a/..@../../x"}, "path"),
    ("/admin/models/m", MODEL | {"path": "/etc/\n/x"}, "path"),
    ("/admin/models/m", MODEL | {"path": "https://example.org/..%2f"}, "path"),
    ("/admin/models/a%09b", MODEL, "name"),
    ("/admin/models/m", MODEL | {"architecture": "Llama\n"}, "architecture"),
    ("/admin/endpoints", ENDPOINT | {"region": "us-east\n"}, "region"),
    ("/admin/endpoints", ENDPOINT | {"model": "llama\n"}, "model"),
    ("/admin/models/m", MODEL | {"weights_bytes": 0}, "weights_bytes"),
    ("/admin/models/a|b", MODEL, "name"),
    ("/admin/profiles", PROFILE | {"tokens_per_s": 0}, "tokens_per_s"),
    ("/admin/profiles", PROFILE | {"gpus": 0}, "gpus"),
    ("/admin/profiles", PROFILE | {"latency": LATENCY | {"switch_s": -1}}, "latency.switch_s"),
    ("/admin/profiles", PROFILE | {"latency": LATENCY | {"decode_base_s": 3601}}, "latency.decode_base_s"),
    ("/admin/profiles", PROFILE | {"latency": LATENCY | {"more": 1}}, "latency.more"),
    ("/admin/profiles", PROFILE | {"latency": {"source": "x"}}, "latency.prefill_base_s"),
    ("/admin/endpoints", ENDPOINT | {"instances_min": 5}, "instances_min"),
)


def test_bad_fields_are_named_and_nothing_is_made(ask: Ask, fleet: None, database: Database) -> None:
    index = _index(database)
    for path, body, param in BAD_FIELDS:
        assert ask("PUT", path, json=body, status=400)["param"] == param, (path, body)
    assert _index(database) == index


def test_no_new_name_is_the_path_of_something_else(ask: Ask, fleet: None, database: Database) -> None:
    for name in ("a/%2E%2E/b", "a/%2E%2E", "a/%2E", "a//b", "a/"):
        for path, body in ((f"/admin/models/{name}", MODEL), (f"/admin/aliases/{name}", {"targets": {"llama": 1}})):
            refused = ask("PUT", path, json=body, status=400)
            assert (refused["param"], "may be empty, '.' or '..'" in refused["detail"]) == ("name", True), path
    with database.transaction() as session:
        session.add(Model(name="a/../b", **MODEL))
    assert ask("PUT", "/admin/models/a/%2E%2E/b", json=MODEL | {"engine": "vllm"})["engine"] == "vllm", "it is kept"
    assert ask("GET", "/admin/models/a/%2E%2E/b", role="viewer")["name"] == "a/../b"
    assert ask("DELETE", "/admin/models/a/%2E%2E/b")["name"] == "a/../b"
    for node in (".", ".."):
        key = {"name": "n", "role": "node", "node": node}
        assert ask("POST", "/admin/keys", role="admin", json=key, status=400)["param"] == "node"


def test_no_name_holds_a_control_character(ask: Ask) -> None:
    for path in ("regions", "gpu-types", "models", "nodes", "tenants"):
        for code in ("%00", "%09", "%1b", "%7f"):
            assert ask("GET", f"/admin/{path}/a{code}b", role="admin", status=400)["param"] == "name", (path, code)
    key = {"name": "n", "role": "node", "node": "a\nb"}
    assert ask("POST", "/admin/keys", role="admin", json=key, status=400)["param"] == "node"


def test_a_model_of_several_gpus_may_ask_for_vllm(ask: Ask, fleet: None) -> None:
    ask("PUT", "/admin/profiles", json=PROFILE | {"gpus": 2})
    assert ask("PUT", "/admin/models/llama", json=MODEL | {"engine": "vllm"})["engine"] == "vllm"


def test_the_layout_of_a_node_is_wanted_and_shown(ask: Ask, database: Database, node: str) -> None:
    path = f"/admin/nodes/{node}/layout"
    refused = ask("PUT", path, json={"layout": [1, 2]}, status=409)
    assert "TIDEPOOL_AGENT_REGROUP" in str(refused)
    slots = (SlotSpec(gpus=4, memory_bytes=320, number=0),)
    offered = {"node": node, "region": "us-east", "gpu_type": "H800", "url": "http://127.0.0.1:1"}
    with database.transaction() as session:
        join_node(session, Join(**offered, engine="replay", slots=slots, regroups=True))
    assert "the slots have 2 GPUs, the node has 4" in str(ask("PUT", path, json={"layout": [1, 1]}, status=400))
    assert ask("PUT", path, json={"layout": []}, status=400)["param"] == "layout"
    ask("PUT", path, role="viewer", json={"layout": [2, 2]}, status=403)
    shown = ask("PUT", path, json={"layout": [2, 1, 1]})
    assert (shown["regroups"], shown["layout"], [slot["gpus"] for slot in shown["slots"]]) == (True, [2, 1, 1], [4])
    assert ask("GET", f"/admin/nodes/{node}", role="viewer")["layout"] == [2, 1, 1]
    assert (shown["layout_held"], shown["warnings"]) == (True, [])
    assert ask("PUT", path, json={"layout": [4]})["layout"] is None
    ask("DELETE", path, role="viewer", status=403)
    assert ask("DELETE", path)["layout_held"] is False
    ask("DELETE", "/admin/nodes/elsewhere/layout", status=404)


def test_bodies_that_are_no_object(ask: Ask) -> None:
    for body in (b"{", b"[]", b'{"memory_bytes": NaN, "cost_per_hour": 1}', b"\xff", b""):
        ask("PUT", "/admin/gpu-types/a", content=body, headers={"content-type": "application/json"}, status=400)
    ask("GET", "/admin/gpu-types/a", status=404)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"[" * 200_000, "the body is nested too deeply"),
        (b'{"position":' + b"1" * 5000 + b"}", "the body holds an integer of more than 4300 digits"),
        (b'"\xff"', "the body is not UTF-8"),
        (b'{"position": 1', "the body is not valid JSON: Expecting ',' delimiter"),
    ],
)
def test_a_body_that_cannot_be_read_is_told_why(ask: Ask, body: bytes, fault: str) -> None:
    headers = {"content-type": "application/json"}
    refused = ask("PUT", "/admin/regions/a", content=body, headers=headers, status=400)
    assert (refused["code"], refused["detail"]) == ("invalid_value", fault)


def test_a_body_without_its_content_type_is_told_so(api: TestClient, secrets: dict[str, str], ask: Ask) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d sends
    said = "send the body with Content-Type: application/json"
    assert ask("PUT", "/admin/regions/a", content=b"{}", headers=headers, status=400)["detail"] == said
    for path in ("chat/completions", "completions", "responses", "messages", "embeddings", "batches"):
        key = {"Authorization": f"Bearer {secrets['client']}"}
        refused = api.post(f"/v1/{path}", content=b'{"model": "m"}', headers=headers | key)
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, said), path


UNKNOWN: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/admin/profiles", PROFILE | {"model": "mars"}, "model"),
    ("/admin/profiles", PROFILE | {"gpu_type": "mars"}, "gpu_type"),
    ("/admin/endpoints", ENDPOINT | {"model": "mars"}, "model"),
    ("/admin/endpoints", ENDPOINT | {"region": "mars"}, "region"),
)


def test_what_it_refers_to_must_exist(ask: Ask, fleet: None) -> None:
    for path, body, param in UNKNOWN:
        assert ask("PUT", path, json=body, status=404)["param"] == param, body


def test_unknown_things_are_404(ask: Ask) -> None:
    for path in ("regions/x", "gpu-types/x", "models/x", "nodes/x"):
        assert ask("GET", f"/admin/{path}", status=404)["code"] == "not_found"
    ask("POST", "/admin/nodes/x/drain", status=404)
    ask("GET", "/admin/nothing", status=404)


def test_an_operators_plan_is_made_once(ask: Ask, fleet: None) -> None:
    once = {"headers": {"Idempotency-Key": "p-1"}, "json": {"dry_run": False}}
    made = ask("POST", "/admin/plans", **once)
    assert ask("POST", "/admin/plans", **once) == made
    assert [plan["id"] for plan in ask("GET", "/admin/plans")["data"]] == [made["plan"]["id"]]


def test_a_nul_is_the_callers_fault(ask: Ask, api: Any, secrets: dict[str, str]) -> None:
    for path in ("/admin/plans/%00", "/admin/nodes/%00"):
        ask("GET", path, status=400)
    headers = {"Authorization": f"Bearer {secrets['client']}"}
    for path in ("/v1/files/a%00b", "/v1/batches/a%00b"):
        assert api.get(path, headers=headers).status_code == 400


def test_pages_cover_everything_once(ask: Ask, fleet: None) -> None:
    for gpu_type in ("A1", "B2", "C3"):
        ask("PUT", f"/admin/gpu-types/{gpu_type}", json={"memory_bytes": 1, "cost_per_hour": 0})
        ask("PUT", "/admin/profiles", json=PROFILE | {"gpu_type": gpu_type})
        ask("PUT", "/admin/profiles", json=PROFILE | {"gpu_type": gpu_type, "model": "Qwen/Qwen3-8B"})
    for path, count in (("gpu-types", 4), ("profiles", 7), ("audit", 16)):
        whole = ask("GET", f"/admin/{path}", params={"limit": 100})
        assert len(whole["data"]) == count
        assert (whole["has_more"], whole["next"]) == (False, None)
        seen, after = [], None
        while True:
            page = ask("GET", f"/admin/{path}", params={"limit": 2} | ({"after": after} if after else {}))
            seen += page["data"]
            after = page["next"]
            if not page["has_more"]:
                break
        assert seen == whole["data"]


def test_bad_pages(ask: Ask) -> None:
    for query in ("limit=0", "limit=101", "limit=x", "after=no-pair", "after=%00"):
        ask("GET", f"/admin/endpoints?{query}", status=400)


def test_nodes_drain_and_come_back(ask: Ask, node: str) -> None:
    listed = ask("GET", "/admin/nodes", role="viewer")["data"]
    assert [(row["name"], row["alive"], row["draining"]) for row in listed] == [(node, False, False)]
    assert [(slot["gpus"], slot["workers"]) for slot in listed[0]["slots"]] == [(1, 1), (2, 2)]
    assert ask("POST", f"/admin/nodes/{node}/drain")["draining"] is True
    ask("POST", f"/admin/nodes/{node}/drain")
    assert ask("GET", f"/admin/nodes/{node}")["draining"] is True
    assert ask("POST", f"/admin/nodes/{node}/undrain")["draining"] is False
    actions = [event["action"] for event in ask("GET", "/admin/audit", params={"limit": 2})["data"]]
    assert actions == ["node.undrain", "node.drain"]


def test_a_heartbeat_makes_a_node_alive(ask: Ask, node: str, api: Any, secrets: dict[str, str]) -> None:
    assert ask("GET", f"/admin/nodes/{node}")["live"] is None
    beat = {"node": node, "boot_id": "b1", "generation": 0, "instances": [], "switches_total": 3}
    api.post("/node/heartbeat", json=beat, headers={"Authorization": f"Bearer {secrets['node']}"}).raise_for_status()
    shown = ask("GET", f"/admin/nodes/{node}")
    assert shown["alive"] is True
    assert shown["last_seen_at"] is not None
    assert shown["live"]["switches_total"] == 3
    assert shown["live_error"] is None
    status = ask("GET", "/admin/status")
    assert [(region["name"], region["nodes_alive"], region["gpus"]) for region in status["regions"]] == [
        ("us-east", 1, 3),
        ("us-west", 0, 0),
    ]
    assert status["plan"] is None
    assert status["requests_waiting"] == 0


def test_a_node_says_its_versions_and_whether_it_is_the_gateways(ask: Ask, node: str, database: Database) -> None:
    def join_as(version: str | None) -> Any:
        with database.transaction() as session:
            join = Join(
                node=node,
                region="us-east",
                gpu_type="H800",
                url="http://127.0.0.1:1",
                slots=(SlotSpec(gpus=1, memory_bytes=80), SlotSpec(gpus=2, memory_bytes=160, workers=2)),
                engine="replay",
                version=version,
                engine_version="2.9.1",
            )
            join_node(session, join)
        [listed] = ask("GET", "/admin/nodes", role="viewer")["data"]
        shown = ask("GET", f"/admin/nodes/{node}")
        assert [shown[name] for name in VERSIONS] == [listed[name] for name in VERSIONS]
        return [shown[name] for name in VERSIONS]

    index = _index(database)
    assert [ask("GET", f"/admin/nodes/{node}")[name] for name in VERSIONS] == [None, False, None], "of an older agent"
    assert join_as(tidepool_version()) == [tidepool_version(), False, "2.9.1"]
    assert join_as("0.0.1") == ["0.0.1", True, "2.9.1"]
    assert join_as(None) == [None, False, "2.9.1"]
    assert _index(database) == index, "a node that comes back with another version changes no plan"


def test_an_endpoint_whose_weights_fit_on_no_slot_is_refused(ask: Ask, fleet: None, database: Database) -> None:
    """Where nobody has joined it is accepted; and limits of an endpoint may always go down to none."""
    ask("PUT", "/admin/models/llama", json=MODEL | {"weights_bytes": 257 * 2**20, "parameters": 257 * 2**19})
    ask("PUT", "/admin/endpoints", json=ENDPOINT)
    slot = SlotSpec(gpus=1, memory_bytes=512 * 2**20, weights_bytes=256 * 2**20)
    url = "http://127.0.0.1:1"
    join = Join(node="n", region="us-east", gpu_type="H800", url=url, slots=(slot,), engine="torch", dtype="float32")
    with database.transaction() as session:
        join_node(session, join)
    refused = ask("PUT", "/admin/endpoints", json=ENDPOINT, status=400)
    assert refused["param"] == "model"
    for words in ("514 MiB in float32", "the largest slot of H800 has 256 MiB", "To change that"):
        assert words in refused["detail"]
    ask("PUT", "/admin/endpoints", json=ENDPOINT | {"instances_max": 0})
    ask("PUT", "/admin/endpoints", json=ENDPOINT | {"region": "us-west"})
    shown = ask("GET", "/admin/nodes/n")
    assert (shown["dtype"], shown["slots"][0]["weights_bytes"]) == ("float32", 256 * 2**20)


def test_a_model_that_embeds_is_registered_as_such(ask: Ask, fleet: None) -> None:
    path = "/admin/models/embedding"
    assert ask("PUT", path, json=MODEL | {"task": "embed"})["task"] == "embed"
    assert ask("PUT", path, json=MODEL)["task"] == "generate", "nothing of it is alive"
    assert ask("PUT", path, json=MODEL | {"task": "dream"}, status=400)["param"] == "task"
    assert ask("PUT", path, json=MODEL | {"task": "score", "engine": "vllm"})["engine"] == "vllm"


def test_a_model_may_say_how_its_answers_are_parsed(ask: Ask, fleet: None) -> None:
    path = "/admin/models/tuned"
    plain = ask("PUT", path, json=MODEL)
    assert (plain["tool_parser"], plain["reasoning_parser"]) == (None, None)
    said = ask("PUT", path, json=MODEL | {"tool_parser": "hermes", "reasoning_parser": "none"})
    assert (said["tool_parser"], said["reasoning_parser"]) == ("hermes", "none")
    refused = ask("PUT", path, json=MODEL | {"tool_parser": "bark"}, status=400)
    assert refused["param"] == "tool_parser"
    assert ask("PUT", path, json=MODEL)["tool_parser"] is None
