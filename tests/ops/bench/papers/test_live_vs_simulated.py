"""The bench that sets live and simulated side by side: what it reads of a slot, and what it makes of both."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from dataplane.protocol.tiers import Tier
from ops.bench.papers.live_clients import Answer
from ops.bench.papers.live_vs_simulated import (
    PATIENT,
    PROFILE,
    REGION,
    Watch,
    rows,
    scenario,
    simulated,
    slowed_profile,
)
from ops.simulator.kernel.requests import Request
from ops.simulator.scenario.formats import traffic_of


def slot(switches: int, *turns: tuple[str, float, float]) -> dict[str, Any]:
    told = [
        {"kind": "decode", "model": model, "tokens": 3, "started_age_s": age_s, "ended_age_s": age_s - length_s}
        for model, age_s, length_s in turns
    ]
    return {"switches_total": switches, "pool": {"turns": told}}


def test_turns_are_counted_once_though_they_are_told_again() -> None:
    watch = Watch()
    watch.look(slot(5, ("a", 3.0, 1.0), ("b", 2.0, 0.5)))
    watch.look(slot(6, ("b", 2.3, 0.5), ("a", 1.0, 0.25)))
    watch.look(slot(8, ("b", 9.3, 0.5), ("a", 8.0, 0.25)))
    watch.look({"switches_total": 8, "pool": None})
    watch.look(slot(9, ("a", 8.5, 0.25), ("a", 1.0, 2.0)))
    assert watch.busy_s == pytest.approx(1.0 + 0.5 + 0.25 + 2.0)
    assert watch.switches == 4


def test_a_slower_profile_makes_everything_take_longer(tmp_path: Path) -> None:
    before, after = tomllib.loads(PROFILE.read_text()), tomllib.loads(slowed_profile(tmp_path, 4.0).read_text())
    assert after["pcie_bytes_per_s"] == pytest.approx(before["pcie_bytes_per_s"] / 4)
    first, slow = before["models"][0], after["models"][0]
    assert slow["decode_base_s"] == pytest.approx(4 * first["decode_base_s"])
    assert (slow["weights_bytes"], slow["gpus"]) == (first["weights_bytes"], first["gpus"])


def test_the_simulated_slot_begins_with_the_models_that_were_asked_last() -> None:
    def asked(model: str) -> float:
        request = Request(
            number=0, arrived_s=1.0, model=model, origin=REGION, tier=Tier.IW_F, prompt_tokens=100, output_tokens=5
        )
        [tier] = simulated(scenario(20.0, 0.5, 1, PROFILE), [request]).tiers
        assert tier.requests == 1
        assert tier.ttft_s is not None
        return tier.ttft_s.p50

    assert max(asked("7b"), asked("14b")) < 0.1 * asked("13b")


def test_both_worlds_have_the_same_objectives() -> None:
    simulated = scenario(20.0, 0.5, 1, PROFILE).targets
    assert {
        f"TIDEPOOL_SLO_{tier.replace('-', '_')}_TTFT_S": f"{one.ttft_s:g}" for tier, one in simulated.items()
    } == PATIENT


def test_what_is_live_as_it_is_simulated_does_not_differ() -> None:
    same = scenario(20.0, 0.5, 1, PROFILE)
    requests = list(traffic_of(same, 1))
    result = simulated(same, requests)
    answers = [Answer(request=request, first_s=1.0, last_s=result.took_s - request.arrived_s) for request in requests]
    watch = Watch(busy_s=result.busy_s, switches=result.switches)
    found = {row.name: row for row in rows(answers, watch, result, result)}
    for name in ("switches", "slot busy, s", "all over after, s"):
        assert found[name].difference == found[name].slowed_difference == 0.0
    assert found["IW-F TTFT p50, s"].live == 1.0
    assert found["IW-F TTFT p50, s"].difference == pytest.approx(found["IW-F TTFT p50, s"].simulated - 1)
