"""Routing by prefix in a whole world: what is saved, by which router, and what block hashes change."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ops.bench.papers.prefix_routers import ROUTERS
from ops.bench.papers.prefix_routing import (
    drawn,
    measure,
    read_trace,
    reuse_of,
    scenario_of,
    shared_beginning,
    write_trace,
)
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import Scenario

Record = dict[str, Any]


def conversations(count: int, turns: int, *, seed: int = 1, gap_s: float = 4.0) -> list[Record]:
    """Conversations that begin one after another; each turn repeats the turns before it and adds three blocks."""
    chance, records = random.Random(seed), []
    for number in range(count):
        begins_s = chance.uniform(0, gap_s * turns)
        for turn in range(1, turns + 1):
            blocks = [number * 1000 + block for block in range(3 * turn)]
            at_ms = 1000 * (begins_s + gap_s * turn)
            records.append(
                {"timestamp": at_ms, "input_length": 1536 * turn + 9, "output_length": 20, "hash_ids": blocks}
            )
    return sorted(records, key=lambda record: record["timestamp"])


def scenario(folder: Path, records: list[Record], **changes: Any) -> Scenario:
    path = folder / "trace.jsonl"
    write_trace(records, faster=1.0, path=path)
    values = {"instances": 4, "kv_bytes": 50 * 10**9, "host_bytes": 0, "gateways": 1}
    return scenario_of(path, **(values | changes))


def test_conversations_return_to_their_instance(tmp_path: Path) -> None:
    records = conversations(12, 5)
    reuse = reuse_of(records)
    assert reuse == pytest.approx(10 / 15, abs=0.01), "0, 1, 2, 3 and 4 turns of 1, 2, 3, 4 and 5"
    rows = {
        name: measure(scenario(tmp_path, records), name, load=1.0, draw=0, reuse=reuse)
        for name in ("cache-aware", "round-robin", "consistent-hash")
    }
    assert all(row.failed == 0 for row in rows.values())
    assert rows["cache-aware"].saved > 0.95 * reuse
    assert rows["consistent-hash"].saved > 0.95 * reuse
    assert rows["round-robin"].saved < 0.7 * reuse
    assert rows["cache-aware"].ttft_p95_s < rows["round-robin"].ttft_p95_s


def test_gateways_that_share_nothing_agree_by_the_home(tmp_path: Path) -> None:
    records = conversations(12, 5)
    row = measure(scenario(tmp_path, records, gateways=8), "cache-aware", load=1.0, draw=0, reuse=1.0)
    assert row.saved > 0.75 * reuse_of(records)


def test_a_prompt_that_all_share_becomes_no_hot_spot(tmp_path: Path) -> None:
    shared = [
        {"timestamp": 40.0 * number, "input_length": 8292, "output_length": 200, "hash_ids": [*range(16), 100 + number]}
        for number in range(500)
    ]
    rows = {
        name: measure(scenario(tmp_path, shared), name, load=1.0, draw=0, reuse=1.0)
        for name in ("cache-aware", "least-loaded", "consistent-hash")
    }
    prefill_s = 0.21  # of the shared beginning, which each instance computes once
    assert rows["cache-aware"].ttft_p95_s < rows["least-loaded"].ttft_p95_s + 2 * prefill_s
    assert rows["consistent-hash"].ttft_p95_s > 4 * rows["cache-aware"].ttft_p95_s


def test_without_hashes_or_without_the_cache_nothing_is_known_of_prompts(tmp_path: Path) -> None:
    records = conversations(6, 4)
    plain = [{key: value for key, value in record.items() if key != "hash_ids"} for record in records]
    worlds = [simulate(scenario(tmp_path, plain)).world]
    off = scenario(tmp_path, records)
    worlds.append(
        simulate(off.model_copy(update={"policy": off.policy.model_copy(update={"prefix_cache": False})})).world
    )
    worlds.append(simulate(scenario(tmp_path, plain), router=ROUTERS["least-loaded"]()).world)
    assert len({world.log.digest for world in worlds}) == 1
    assert all(world.cached_tokens == 0 for world in worlds)
    known = simulate(scenario(tmp_path, records)).world
    assert known.log.digest != worlds[0].log.digest
    assert known.cached_tokens > 0
    again = simulate(scenario(tmp_path, records)).world
    assert again.log.digest == known.log.digest


def test_draws_keep_whole_conversations(tmp_path: Path) -> None:
    records = conversations(40, 3)
    assert drawn(records, 0) == records
    kept = drawn(records, 1)
    assert 0 < len(kept) < len(records)
    assert len(kept) % 3 == 0
    assert drawn(records, 1) == kept
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in kept))
    assert read_trace(path) == kept


def test_a_load_with_a_shared_beginning_is_as_it_says() -> None:
    records = shared_beginning(50.0, 0, duration_s=40.0)
    assert 1700 < len(records) < 2300
    sharing = [record for record in records if record["hash_ids"][:32] == list(range(32))]
    assert len(sharing) / len(records) == pytest.approx(0.6, abs=0.05)
    assert all(len(record["hash_ids"]) * 512 >= record["input_length"] for record in records)
    assert reuse_of(records) == pytest.approx(0.87, abs=0.03)
