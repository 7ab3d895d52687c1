"""Scenario files, the traffic they make, and the command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from ops.cli.main import app
from ops.client.api import CommandError
from ops.simulator.kernel.requests import Request
from ops.simulator.scenario.scenario import Scenario, ScenarioError, load_scenario
from ops.simulator.traffic.traffic import generate
from ops.simulator.traffic.traffic_parts import GeneratedPart
from ops.simulator.world.measures import Histogram
from tests.ops.simulator.examples import SMALL, changed
from tests.ops.simulator.fixed import scenario_of


def test_the_example_is_one() -> None:
    scenario = load_scenario(SMALL)
    assert scenario.regions == ["us-east", "eu-west"]
    assert Path(scenario.fleet.profile).exists()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("seed = 1 ", "sed = 1 ", "sed: Extra inputs are not permitted"),
        ("rate_per_s = 8.0", "rate_per_s = -1", "traffic.rate_per_s: Input should be greater than 0"),
        ('kind = "generated"', 'kind = "made-up"', "traffic: Input tag 'made-up'"),
        (
            'model = "large", region = "eu-west"',
            'model = "huge", region = "eu-west"',
            "fleet.instances.1.model: no model",
        ),
        ('"us-east > eu-west"', '"us-east to eu-west"', "latencies_ms.us-east to eu-west: must be"),
        ('serving = "dedicated"', 'serving = "pooled"', "fleet: serving = 'pooled' needs prefill_slots"),
        ("{ us-east = 2, eu-west = 1 }", "{ us-east = 0 }", "origins: at least one share must be over 0"),
        (
            'regions = ["us-east", "eu-west"]',
            'regions = ["us-east", "eu-west", "eu-west"]',
            "regions: a name is there twice",
        ),
        ("duration_s = 600", "duration_s = 1e300", "traffic.duration_s: Input should be less than"),
        ("cv = 1.5", "cv = 1e200", "traffic.cv: Input should be less than"),
        ("cv = 1.5", "cv = 1e-200", "traffic.cv: Input should be greater than"),
        ("spread = 1.0", "spread = 60", "_tokens.spread: Input should be less than"),
        ("eu-west = 1 }", "eu-west = 1e308 }", "traffic.origins.eu-west: Input should be less than"),
        ("[fleet]", "[fleet", "is not TOML"),
        ("[fleet]", "[planning]\nquantile = 0.8\n[fleet]", "planning.quantile: needs [scaling]"),
        ("context_tokens = 8192", "context_tokens = 8192\ngpus = 2", "models.0.gpus: needs [scaling]"),
        ("[fleet]", "[provisioning]\nlocal_s = 1\n[fleet]", "provisioning.local_s: needs [scaling]"),
        ("[fleet]", '[fleet]\nnodes = [{ region = "eu-west" }]', "fleet.nodes: needs [scaling]"),
        ("[fleet]", "[fleet]\nboth_slots = 2", "fleet: both_slots: serving = 'dedicated' has none"),
        ("[policy]", "[policy]\ntries_max = 2", "policy: tries_max: needs admission = true"),
        ("[policy]", "[policy]\nclairvoyant = 3", "policy.clairvoyant: Input should be a valid boolean"),
        ('kind = "generated"', 'kind = "generated"\nmodels = ["none"]', "traffic.models.none: no such model"),
        ("[fleet]", "[provisioning]\nspot_same_spread = 4\n[fleet]", "spot_same_spread: Input should be less"),
        (
            "[fleet]",
            "[provisioning]\nspot_same_s = 301\n[fleet]",
            "provisioning: spot_same_s 301 is above spot_same_most_s 300",
        ),
    ],
)
def test_errors_name_the_key(tmp_path: Path, before: str, after: str, said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(changed(SMALL, tmp_path, (before, after)))
    assert str(tmp_path) in str(caught.value)
    assert said in str(caught.value)


def test_a_request_level_gpu_has_room_for_the_largest_model() -> None:
    assert scenario_of("request-level", weights_bytes=15 * 10**9).fleet.weights_bytes == 15 * 10**9
    with pytest.raises(ValidationError, match=r"fleet\.weights_bytes: must be at least 15000000000, those of 'a'"):
        scenario_of("request-level", weights_bytes=15 * 10**9 - 1)


@pytest.mark.parametrize(
    ("serving", "fleet", "said"),
    [
        ("both", {"pool_nodes": 3}, "both_slots: must be a multiple of pool_nodes, 3"),
        ("pooled", {"pool_nodes": 2}, "prefill_slots: must be a multiple of pool_nodes, 2"),
        ("static", {"pool_nodes": 2}, "pool_nodes, host_bytes: only serving = 'pooled' has them"),
        ("request-level", {"host_bytes": 1}, "pool_nodes, host_bytes: only serving = 'pooled' has them"),
    ],
)
def test_slots_of_pools_are_shared_out_to_nodes_evenly(serving: str, fleet: dict[str, int], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        scenario_of(serving, **fleet)


def with_adapter(serving: str, fleet: dict[str, Any], **changes: Any) -> Scenario:
    """Three models, of which b is an adapter of a."""
    document = scenario_of("both").model_dump(exclude_unset=True)
    a, b, c = document["models"]
    document["models"] = [a, b | {"base": "a", "weights_bytes": 10**8} | changes, c]
    if fleet:
        document["fleet"] = scenario_of(serving).fleet.model_dump(exclude_unset=True) | fleet
    return Scenario.model_validate(document)


@pytest.mark.parametrize(
    ("serving", "fleet", "changes", "said"),
    [
        ("both", {}, {"base": "z"}, "models.1.base: 'z' is no model that adapters can be of"),
        ("both", {}, {"base": "b"}, "models.1.base: 'b' is no model that adapters can be of"),
        ("both", {}, {"context_tokens": 7}, "models.1.context_tokens: must be 32768, that of 'a'"),
        ("both", {}, {"kv_bytes_per_token": 7}, "models.1.kv_bytes_per_token: must be 200000, that of 'a'"),
        ("both", {"adapters_bytes": 7}, {}, "fleet.adapters_bytes: must be at least 100000000, those of all adapters"),
        ("both", {"adapter_steps": [[4, 1.1], [1, 1.0]]}, {}, "adapter_steps: must be in rising order"),
        ("static", {"gpus": 1}, {}, "models.1.base: serving = 'static' knows whole models only"),
        ("request-level", {"gpus": 1}, {}, "models.1.base: serving = 'request-level' knows whole models only"),
        ("both", {}, {"base": None, "with_base": True}, "with_base: only a LoRA adapter is served with its base"),
        (
            "dedicated",
            {"instances": [{"model": "b", "region": "east"}]},
            {"with_base": True},
            "fleet.instances.0.model: no model 'b' with instances of its own",
        ),
    ],
)
def test_an_adapter_is_as_its_base(serving: str, fleet: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    assert with_adapter("both", {}).models[1].base == "a"
    with pytest.raises(ValidationError) as caught:
        with_adapter(serving, fleet, **changes)
    assert said in str(caught.value)


def generated(seed: int, **changes: Any) -> list[Request]:
    lengths = {"median": 100, "spread": 0.5, "most": 150}
    given: dict[str, Any] = {
        "kind": "generated",
        "rate_per_s": 2.0,
        "duration_s": 5000.0,
        "zipf": 1.0,
        "origins": {"r": 1.0},
        "tiers": {"IW-F": 1.0},
        "prompt_tokens": lengths,
        "output_tokens": lengths,
    }
    return list(generate(GeneratedPart.model_validate(given | changes), ["a", "b"], seed))


def test_generated_traffic_has_its_rate_shape_and_shares() -> None:
    requests = generated(1, duration_s=86_400.0, rate_per_s=0.5, day_swing=0.8, peak_hour=12.0)
    times_s = np.array([request.arrived_s for request in requests])
    assert [request.number for request in requests] == list(range(len(requests)))
    assert np.all(np.diff(times_s) >= 0)
    assert len(requests) == pytest.approx(43_200, rel=0.02)
    noon, night = np.sum(abs(times_s - 43_200) < 3600), np.sum(times_s < 3600) + np.sum(times_s > 82_800)
    assert noon / night == pytest.approx(9.0, rel=0.15)
    assert np.mean([request.model == "a" for request in requests]) == pytest.approx(2 / 3, rel=0.02)
    assert max(request.prompt_tokens for request in requests) == 150
    assert np.median([request.output_tokens for request in requests]) == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_generated_intervals_vary_as_asked(cv: float) -> None:
    intervals_s = np.diff([request.arrived_s for request in generated(2, cv=cv, duration_s=20_000.0)])
    assert intervals_s.std() / intervals_s.mean() == pytest.approx(cv, rel=0.05)


def test_a_burst_multiplies_the_rate() -> None:
    burst = {"start_s": 1000.0, "duration_s": 500.0, "factor": 8.0}
    times_s = np.array([request.arrived_s for request in generated(3, bursts=[burst])])
    assert np.sum((times_s >= 1000) & (times_s < 1500)) == pytest.approx(8000, rel=0.05)
    assert np.sum(times_s < 1000) == pytest.approx(2000, rel=0.1)


def test_quantiles_are_right_to_one_percent() -> None:
    times_s = np.random.default_rng(1).lognormal(0.0, 2.0, 5000)
    histogram = Histogram()
    for part in np.split(times_s, 5):
        histogram.add(part)
    for share in (0.1, 0.5, 0.95, 0.99):
        exact = np.quantile(times_s, share, method="inverted_cdf")
        assert histogram.quantile(share) == pytest.approx(exact, rel=0.0101)
    assert histogram.quantile(1.0) == pytest.approx(times_s.max(), rel=0.0101)


def test_the_command_shows_a_report_and_writes_its_figures(tmp_path: Path) -> None:
    path = changed(SMALL, tmp_path, ("duration_s = 600 ", "duration_s = 15 "))
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["simulate", str(path), "--seed", "7", "--json", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["seed"] == 7
    assert document["event_log_hash"] in result.stdout
    assert sum(row["requests"] for row in document["rows"]) == document["requests"] > 50


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", str(changed(SMALL, tmp_path, ("h800.toml", "none.toml")))])
    assert isinstance(result.exception, CommandError)
    assert "none.toml" in str(result.exception)
    with pytest.raises(ScenarioError, match="cannot be read"):
        load_scenario(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--json", "nowhere/out.json"], "nowhere/out.json: cannot be written"),
        (["--report", "nowhere/out.html"], "nowhere/out.html: cannot be written"),
        (["--save", "saved.toml"], "need --from-live"),
        (["--hours", "2"], "need --from-live"),
        (["--set", "planning.learn_s=3600"], "no request arrived"),
        (["--trace", "aegaeon:trace.csv", "--set", "traffic.workload=w"], "models of aegaeon need fleet.serving"),
    ],
)
def test_what_cannot_come_to_anything_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text("workload,request_time,model_name,input_len,output_len\nw,00:00:01.0,m_1,5,5\n")
    result = CliRunner().invoke(app, ["simulate", str(SMALL), *asked])
    assert isinstance(result.exception, CommandError)
    assert said in str(result.exception)
