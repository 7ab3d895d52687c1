"""The comparison of slots that switch: its loads, its ways, its table."""

import json
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from ops.bench.papers.remapping_slots import CASES, WAYS, draw_requests, main, measure


def invoke(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize("case", CASES)
def test_no_request_exceeds_the_kv_memory_and_equal_seeds_draw_equal_requests(case: str) -> None:
    for load in CASES[case]:
        requests = draw_requests(load, 1)
        assert requests == draw_requests(load, 1) != draw_requests(load, 2)
        longest = max(len(each.prompt) + each.max_tokens for _, each in requests)
        assert longest * load.model.kv_bytes_per_token <= 0.9 * load.kv_bytes
        assert {each.instance_id for _, each in requests} == {f"m{number}" for number in range(load.models)}


def test_kv_has_the_place_where_it_pays_and_only_then() -> None:
    busy = replace(CASES["fast-link"][-1], duration_s=25.0)
    calm = replace(CASES["eight"][0], duration_s=10.0)
    figures = {way: measure(busy, way, 1) for way in WAYS}
    assert figures["auto"].lent > 0
    assert figures["auto"].tokens_per_s > figures["swap"].tokens_per_s
    assert figures["swap"].lent == figures["more"].lent == 0
    assert measure(calm, "auto", 1) == measure(calm, "swap", 1)


def test_the_command_prints_a_row_for_each_load_and_way() -> None:
    chosen = ("--case", "four", "--rate", "1", "--way", "swap", "--way", "auto", "--seeds", "1")
    code, out = invoke(*chosen, "--json")
    assert code == 0
    rows = json.loads(out[out.index("{") :])["runs"]
    assert [(row["case"], row["way"]) for row in rows] == [("four", "swap"), ("four", "auto")]
    assert all(row["in_time_low"] <= row["in_time_percent"] <= row["in_time_high"] for row in rows)
    assert invoke("--case", "five")[0] == 2
