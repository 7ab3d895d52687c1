"""The benchmark of adapters against whole models."""

import pytest

from ops.bench.planner.adapters import SCENARIO, as_whole, compared, show, with_gpus
from ops.simulator.scenario.scenario import load_scenario


def test_whole_models_are_of_their_bases_size() -> None:
    scenario = load_scenario(SCENARIO)
    whole = as_whole(scenario)
    assert [model.base for model in scenario.models] == [None, *["tide"] * 16]
    assert {(model.base, model.weights_bytes) for model in whole.models} == {(None, scenario.models[0].weights_bytes)}
    assert whole.traffic == scenario.traffic
    assert with_gpus(scenario, 5).fleet.both_slots == 5


def test_adapters_share_the_weights_of_their_base(capsys: pytest.CaptureFixture[str]) -> None:
    scenario = load_scenario(SCENARIO, settings=["traffic.duration_s=60"])
    adapters, whole = found = list(compared(scenario, [1], seed=1))
    assert adapters.switches == 1 < whole.switches
    assert adapters.late < whole.late
    assert adapters.weights_gb * 10 < whole.weights_gb
    show(found)
    assert "adapters" in capsys.readouterr().out
