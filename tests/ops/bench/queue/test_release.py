"""The bench of releases: its agents have a worker for each instance, and its shares are what they say."""

import json
from dataclasses import replace

import pytest

from ops.bench.queue.release import Load, Round, nodes, rows

LOAD = Load(lines=100, words=10, tokens=8, batch_max=32)


@pytest.mark.parametrize(("instances", "agents"), [(1, 1), (4, 1), (16, 2), (17, 3)])
def test_each_instance_has_a_worker(instances: int, agents: int) -> None:
    found = nodes(instances, LOAD, 0.1)
    assert len({node.name for node in found}) == agents
    assert sum(len(json.loads(str(node.settings["slots"]))) for node in found) == instances


def test_a_share_is_of_the_same_lines_in_the_same_round() -> None:
    def one(instances: int, direct_s: float, batch_s: float) -> Round:
        return Round(
            instances=instances,
            lines=100,
            direct_s=direct_s,
            batch_s=batch_s,
            direct_cached=0.1,
            batch_cached=0.2,
            dispatcher=batch_s / 100,
            busy=0.5,
        )

    found = rows([one(1, 10.0, 10.0), one(1, 10.0, 20.0), one(1, 20.0, 25.0), one(4, 3.0, 4.0)])
    assert [(row.instances, row.share, row.direct_per_s, row.batch_per_s) for row in found] == [
        (1, 0.8, 10.0, 5.0),
        (4, 0.75, pytest.approx(100 / 3), 25.0),
    ]


def test_prompts_differ_and_have_their_length() -> None:
    assert len({LOAD.prompt(line) for line in range(9)}) == 9
    assert {len(LOAD.prompt(line).split()) for line in range(9)} == {10}
    assert LOAD.in_flight == 40


def test_prompts_begin_in_turn_with_the_same_words() -> None:
    load = replace(LOAD, prefixes=8, prefix_words=400)
    beginnings = [load.prompt(line, 3).split()[:400] for line in range(16)]
    assert beginnings[:8] == beginnings[8:]
    assert len({" ".join(each) for each in beginnings}) == 8
    assert beginnings[0] != load.prompt(0, 4).split()[:400], "the cache knows none of an earlier run"
    assert load.prompt(5, 3).endswith(LOAD.prompt(5))
