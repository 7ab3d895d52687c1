"""The agent's figures of memory. Those of KV pressure have their names, and their former names for one release."""

from prometheus_client import generate_latest

from dataplane.agent.metrics import agent_registry
from dataplane.agent.node import Agent
from dataplane.agent.state import node_state
from dataplane.engines.interface import EngineStats, PoolStats, TimeSlice
from tests.dataplane.replay_node import settings


def make_agent() -> Agent:
    pool = PoolStats(
        now_s=1.0,
        offloaded_layers={"m": 3},
        pressure_actions={"swap": 2},
        offloads_declined={"switching": 5},
        layers_moved={"offloaded": 7, "reclaimed": 4},
        kv_imports={"nothing": 1, "host": 6, "device": 0},
        time_slices=(
            TimeSlice(kind="decode", model="m", started_s=0.5, ended_s=0.75, tokens=1, prompt_tokens=0, switched=False),
        ),
    )
    agent = Agent(settings(), boot_id="boot")
    stats = EngineStats(pool=pool, prefix_query_tokens={"m": 90, "n": 7}, prefix_hit_tokens={"m": 64})
    agent.workers[0].stats, agent.workers[0].stats_s = stats, 10.0
    return agent


def test_the_state_has_its_new_keys_and_its_former_ones() -> None:
    (worker,) = node_state(make_agent(), 12.0)["slots"]
    pool = worker["pool"]
    assert pool["offloaded_layers"] == pool["given_up"] == {"m": 3}
    assert pool["pressure_actions"] == pool["relief"] == {"swap": 2}
    assert pool["offloads_declined"] == pool["not_remapped"] == {"switching": 5}
    assert [(turn["started_age_s"], turn["ended_age_s"]) for turn in pool["turns"]] == [(2.5, 2.25)]
    assert "time_slices" not in pool, "times of the engine's clock mean nothing to a reader"


def test_kv_pressure_has_its_new_names_and_its_former_ones() -> None:
    lines = set(generate_latest(agent_registry(make_agent())).decode().splitlines())
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


def test_kv_of_other_workers_is_counted_by_what_its_copies_waited_for() -> None:
    lines = set(generate_latest(agent_registry(make_agent())).decode().splitlines())
    assert lines >= {
        'tidepool_kv_imports_total{slot="0",waited_for="nothing"} 1.0',
        'tidepool_kv_imports_total{slot="0",waited_for="host"} 6.0',
        'tidepool_kv_imports_total{slot="0",waited_for="device"} 0.0',
    }


def test_prefix_cache_queries_and_hits_are_in_tokens_by_model_and_worker() -> None:
    lines = set(generate_latest(agent_registry(make_agent())).decode().splitlines())
    assert lines >= {
        'vllm:prefix_cache_queries_total{model_name="m",slot="0"} 90.0',
        'vllm:prefix_cache_queries_total{model_name="n",slot="0"} 7.0',
        'vllm:prefix_cache_hits_total{model_name="m",slot="0"} 64.0',
    }
