"""`tidepool simulate --from-live` against a running API: what it gathers, the scenario that it writes, and its run."""

import json
import tomllib
from pathlib import Path

import pytest
from sqlalchemy import select

from controlplane.settings import Settings
from controlplane.store.fleet import touch_node
from controlplane.store.instances import add_instance
from controlplane.store.keys import make_key
from controlplane.store.session import Database
from controlplane.store.tables import Node, Role
from dataplane.protocol.joining import SlotSpec
from ops.cli.simulate_live import profiles_by_type
from ops.simulator.scenario.live import LiveError, cut_demand
from tests.ops.cli.running import GIB, Run, join
from tests.ops.local.test_checkpoints import write_checkpoint

HOUR_S = 3600


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """A node heard of once stays alive, however slow the machine is; what is let go is not lent out."""
    return settings.model_copy(update={"heartbeat_stale_s": 3600.0, "spot_enabled": False, "scale_out_above": 0.6})


@pytest.fixture
def fleet(served: Run, database: Database, tmp_path: Path) -> Run:
    """Two regions with a node each, a model in both with two hours of demand, and a model that nobody asks for."""
    for region in ("east", "west"):
        served("region", "add", region)
    served("region", "latency", "east", "west", "60")
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2)
    for name in ("org/m", "idle"):
        checkpoint = write_checkpoint(tmp_path / "tiny")
        added = served("model", "add", name, "--path", checkpoint, "--tokens-per-s", "H800=2500", "--region", "east")
        assert added.status == 0, added.err
    served("endpoint", "set", "org/m", "west", "--min", 1, "--max", 3)
    for region in ("east", "west"):
        join(database, f"{region}-1", *[SlotSpec(gpus=1, memory_bytes=80 * GIB)] * 4, region=region)
    with database.transaction() as session:
        for region in ("east", "west"):
            touch_node(session, f"{region}-1")
            add_instance(session, model="org/m", region=region, gpu_type="H800", node=f"{region}-1", slot=0, gpus=1)
    rows = [f"{start_s},{region},org/m,{rate}\n" for region, rate in (("east", 900), ("west", 300))
            for start_s in range(10 * HOUR_S, 12 * HOUR_S, 60)]  # fmt: skip
    demand = tmp_path / "demand.csv"
    demand.write_text("start_s,region,model,tokens_per_s\n" + "".join(rows))
    assert served("demand", "import", demand).status == 0
    return served


def test_the_running_fleet_becomes_a_scenario_and_is_simulated(fleet: Run, tmp_path: Path) -> None:
    saved, out = tmp_path / "live.toml", tmp_path / "out.json"
    outcome = fleet("simulate", "--from-live", "--hours", "1", "--save", saved, "--json", out)
    assert outcome.status == 0, outcome.err
    assert "Models without demand or without a profile on H800 are left out: idle" in outcome.err
    scenario = tomllib.loads(saved.read_text())
    assert scenario["latencies_ms"]["east > west"] == 30
    assert scenario["fleet"]["instances"] == [
        {"model": "org/m", "region": region, "count": 1} for region in ("east", "west")
    ]
    assert scenario["fleet"]["nodes"][0] == {"region": "east", "count": 1, "slots": 4, "gpus": 1}
    assert scenario["fleet"]["cost_per_hour"] == {"H800": 2}, "as it is told here, not the profile's"
    assert scenario["planning"]["learn_s"] == HOUR_S
    assert [model["name"] for model in scenario["models"]] == ["org/m"]
    assert scenario["provisioning"]["weights"] == {"org/m": ["east", "west"]}
    assert (scenario["scaling"]["spot"], scenario["scaling"]["out_above"]) == (False, 0.6)
    result = json.loads(out.read_text())
    assert result["strategy"] == "lt-i"
    arrived = sum(row["input_tokens"] for row in result["rows"])
    assert arrived == pytest.approx(1200 * HOUR_S, rel=0.1)
    again = fleet("simulate", saved, "--policy", "reactive", "--json", tmp_path / "reactive.json")
    assert again.status == 0, again.err
    compared = fleet("simulate", "compare", out, tmp_path / "reactive.json", "--json").json
    assert {line["name"] for line in compared["figures"]} >= {"cost", "service attainment", "GPU hours serving"}


def test_a_fleet_of_two_gpu_types_becomes_a_scenario_of_two(fleet: Run, database: Database, tmp_path: Path) -> None:
    """With what each costs here, and one start time; what is wanted of one type only is that type's alone."""
    fleet("gpu", "add", "H20", "--memory-gib", 96, "--cost-per-hour", 0.5)
    changed = fleet("model", "profile", "org/m", "--tokens-per-s", "H20=1400", "--load-time-s", 90)
    assert changed.status == 0, changed.err
    for name in ("west-2", "west-3"):
        join(database, name, *[SlotSpec(gpus=1, memory_bytes=96 * GIB)] * 2, region="west", gpu_type="H20")
    with database.transaction() as session:
        for name in ("west-2", "west-3"):
            touch_node(session, name)
        add_instance(session, model="org/m", region="west", gpu_type="H20", node="west-2", slot=0, gpus=1)
    saved, out = tmp_path / "live.toml", tmp_path / "out.json"
    outcome = fleet("simulate", "--from-live", "--hours", "1", "--save", saved, "--json", out)
    assert outcome.status == 0, outcome.err
    assert "One start time holds for all models and GPU types" in outcome.err
    scenario = tomllib.loads(saved.read_text())
    assert scenario["provisioning"]["local_s"] == 90
    served = scenario["fleet"]
    assert (served["profile"], served["cost_per_hour"]) == ("h20.toml", {"H20": 0.5, "H800": 2.0})
    assert served["instances"] == [
        {"model": "org/m", "region": region, "count": 1, "gpu_type": gpu_type}
        for region, gpu_type in (("east", "H800"), ("west", "H20"), ("west", "H800"))
    ]
    h800, h20 = served["nodes"][0], served["nodes"][1]
    assert h20 == {"region": "west", "count": 2, "slots": 2, "gpus": 1}
    assert {**h800, "kv_bytes": 0} == {
        "region": "east", "count": 1, "slots": 4, "gpus": 1, "profile": "h800.toml", "kv_bytes": 0,
    }  # fmt: skip
    assert h800["kv_bytes"] < served["kv_bytes"], "an H20 has more memory"
    assert scenario["models"][0]["tokens_per_s"] == {"H20": 1400, "H800": 2500}
    totals = json.loads(out.read_text())["totals"]
    assert totals["gpu_types"]["H20"]["cost"] == pytest.approx(0.5 * totals["gpu_types"]["H20"]["gpu_hours"]["serving"])
    only = fleet("simulate", "--from-live", "--hours", "1", "--gpu-type", "H800", "--save", saved)
    assert only.status == 0, only.err
    assert "Nodes of other GPU types are left out: H20" in only.err
    assert tomllib.loads(saved.read_text())["models"][0]["tokens_per_s"] == 2500
    assert "on H20" not in only.out


def test_how_the_plan_in_force_pools_is_carried_over(fleet: Run, database: Database, tmp_path: Path) -> None:
    with database.transaction() as session:
        for node in session.scalars(select(Node)):
            node.host_bytes = 512 * GIB
    drafted = fleet("plan", "create", "--json").json["plan"]["id"]
    applied = fleet("plan", "apply", drafted)
    assert applied.status == 0, applied.err
    saved, out = tmp_path / "live.toml", tmp_path / "out.json"
    outcome = fleet("simulate", "--from-live", "--hours", "1", "--save", saved, "--json", out)
    assert outcome.status == 0, outcome.err
    scenario = tomllib.loads(saved.read_text())
    assert {key: value for key, value in scenario["planning"].items() if key.startswith("pool")} == {
        "pools": True,
        "pool_fill": 0.8,
        "pool_prompt_tokens": 512.0,
        "pool_output_tokens": 256.0,
        "pool_tbt_s": 0.1,
        "pool_round_s": 12.0,
    }
    assert {node["host_bytes"] for node in scenario["fleet"]["nodes"]} == {512 * GIB}
    assert json.loads(out.read_text())["totals"]["gpu_hours"].keys() >= {"serving"}


def test_a_viewer_simulates_with_default_settings(fleet: Run, database: Database, tmp_path: Path) -> None:
    with database.transaction() as session:
        secret = make_key(session, name="viewer", role=Role.VIEWER, tenant="default").secret
    saved = tmp_path / "live.toml"
    outcome = fleet("--key", secret, "simulate", "--from-live", "--hours", "1", "--save", saved)
    assert outcome.status == 0, outcome.err
    assert "The settings of the service may not be read with this key" in outcome.err
    assert "spot" not in tomllib.loads(saved.read_text())["scaling"]


def test_what_cannot_be_meant_is_said(fleet: Run, tmp_path: Path) -> None:
    assert "either a scenario or --from-live" in fleet("simulate", "run").err
    assert "either a scenario or --from-live" in fleet("simulate", "x.toml", "--from-live").err
    assert "--gpu-type A100: nodes have H800" in fleet("simulate", "--from-live", "--gpu-type", "A100").err
    nowhere = tmp_path / "none" / "x.toml"
    assert "cannot be written" in fleet("simulate", "--from-live", "--save", nowhere).err


def test_demand_is_cut_at_a_whole_hour() -> None:
    rows = [(start_s, "r", "m", 1.0, "") for start_s in range(1800, 4 * HOUR_S, 60)]
    demand = cut_demand(rows, simulated_s=2 * HOUR_S, learn_s_max=HOUR_S)
    assert (demand.rows[0][0], demand.learn_s, demand.simulated_s) == (HOUR_S, HOUR_S, 2 * HOUR_S)
    short = cut_demand(rows, simulated_s=9 * HOUR_S, learn_s_max=HOUR_S)
    assert (short.rows[0][0], short.learn_s, short.simulated_s) == (HOUR_S, 0, 3 * HOUR_S)
    with pytest.raises(LiveError, match="30 minutes of demand are known"):
        cut_demand(rows[:30], simulated_s=HOUR_S, learn_s_max=0)
    with pytest.raises(LiveError, match="no demand is known"):
        cut_demand([], simulated_s=HOUR_S, learn_s_max=0)


def test_a_profile_is_found_by_its_gpu_type_whatever_its_file_is_called() -> None:
    assert profiles_by_type() == {
        "A10": "a10.toml",
        "8xA100": "a100x8.toml",
        "A100": "a100-gpt-oss.toml",
        "H100": "h100-artifact.toml",
        "H20": "h20.toml",
        "H800": "h800.toml",
    }
