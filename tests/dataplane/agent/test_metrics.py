"""The agent's metrics of KV pressure: each value under its name, and under its former name for one release."""

from prometheus_client import generate_latest

from dataplane.agent.metrics import agent_registry
from dataplane.agent.node import Agent
from dataplane.engines.interface import EngineStats, PoolStats
from tests.dataplane.replay_node import settings


def test_kv_pressure_has_its_new_names_and_its_former_ones() -> None:
    pool = PoolStats(
        now_s=1.0,
        offloaded_layers={"m": 3},
        pressure_actions={"swap": 2},
        offloads_declined={"switching": 5},
        layers_moved={"offloaded": 7, "reclaimed": 4},
    )
    agent = Agent(settings(), boot_id="boot")
    agent.workers[0].stats = EngineStats(pool=pool)
    lines = set(generate_latest(agent_registry(agent)).decode().splitlines())
    assert lines >= {
        'tidepool_offloaded_weight_layers{model_name="m",slot="0"} 3.0',
        'tidepool_kv_pressure_events_total{action="swap",slot="0"} 2.0',
        'tidepool_weight_offloads_declined_total{reason="switching",slot="0"} 5.0',
        'tidepool_weight_layers_moved_total{direction="offloaded",slot="0"} 7.0',
        'tidepool_weight_layers_moved_total{direction="reclaimed",slot="0"} 4.0',
        'tidepool_given_up_layers{model_name="m",slot="0"} 3.0',
        'tidepool_kv_relief_total{slot="0",way="swap"} 2.0',
        'tidepool_not_remapped_total{reason="switching",slot="0"} 5.0',
        'tidepool_moved_layers_total{slot="0",way="lent"} 7.0',
    }
    assert any(line == "# HELP tidepool_kv_relief_total Deprecated: tidepool_kv_pressure_events" for line in lines)
