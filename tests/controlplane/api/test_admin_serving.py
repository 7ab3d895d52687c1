"""What operators set for serving: objectives of models and latencies between regions."""

from controlplane.store.fleet import fleet_index, load_catalog
from controlplane.store.session import Database
from tests.controlplane.api.conftest import MODEL, Ask

SLO = {"IW-F": {"ttft_s": 0.5, "tbt_s": 0.05}}


def test_objectives_of_a_model(ask: Ask) -> None:
    assert ask("PUT", "/admin/models/llama", json=MODEL)["slo"] is None
    assert ask("PUT", "/admin/models/llama", json=MODEL | {"slo": SLO})["slo"] == SLO
    assert ask("GET", "/admin/models/llama", role="viewer")["slo"] == SLO
    assert ask("PUT", "/admin/models/llama", json=MODEL)["slo"] is None
    for slo, param in (
        ({"NIW": SLO["IW-F"]}, "slo.NIW"),
        ({"IW-F": {"ttft_s": 0, "tbt_s": 0.1}}, "slo.IW-F.ttft_s"),
        ({"IW-F": {"ttft_s": 1}}, "slo.IW-F.tbt_s"),
    ):
        refused = ask("PUT", "/admin/models/llama", json=MODEL | {"slo": slo}, status=400)
        assert refused["param"].startswith(param), refused


def test_latencies(ask: Ask, fleet: None, database: Database) -> None:
    there = {"origin": "us-east", "destination": "us-west", "ms": 62.0}
    unowned = {"owner": None}
    with database.transaction() as session:
        index = fleet_index(session)
    assert ask("PUT", "/admin/region-latencies", json=there) == there | unowned
    assert ask("PUT", "/admin/region-latencies", json=there | {"ms": 60}) == there | {"ms": 60.0} | unowned
    assert ask("GET", "/admin/region-latencies", role="viewer")["data"] == [there | {"ms": 60.0} | unowned]
    with database.transaction() as session:
        assert fleet_index(session) == index, "no plan is made stale"
        assert load_catalog(session).latencies_ms == {("us-east", "us-west"): 60.0}
    assert ask("PUT", "/admin/region-latencies", json=there | {"origin": "mars"}, status=404)["param"] == "origin"
    same = there | {"destination": "us-east"}
    assert ask("PUT", "/admin/region-latencies", json=same, status=400)["param"] == "destination"
    assert ask("PUT", "/admin/region-latencies", json=there | {"ms": -1}, status=400)["param"] == "ms"
    ask("PUT", "/admin/region-latencies", role="viewer", json=there, status=403)
