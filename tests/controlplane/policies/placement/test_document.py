"""Problems as JSON documents: what is refused and where, and the way there and back."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.policies.placement.document import parse, to_document
from controlplane.policies.placement.document_schema import DocumentError, schema
from controlplane.policies.placement.facts import PlacementFacts, PlacementSettings
from controlplane.policies.placement.pools import PoolLoad, occupancy_of
from dataplane.protocol.tiers import Tier
from tests.controlplane.policies.placement.problems import small_facts

EXAMPLE = Path(__file__).resolve().parents[4] / "ops" / "scenarios" / "problem-small.json"
Change = Callable[[dict[str, Any]], object]


def problem(change: Change | None = None) -> str:
    document = json.loads(EXAMPLE.read_text())
    if change is not None:
        change(document)
    return json.dumps(document)


def test_the_example_says_what_it_seems_to_say() -> None:
    facts, how = parse(problem())
    east, chat = Endpoint(model="chat-70b", region="us-east"), ModelGpu(model="chat-70b", gpu_type="H100")
    assert facts.regions == ("us-east", "us-west")
    assert facts.capacity[RegionGpu(region="us-west", gpu_type="L40S")] == 8
    assert (facts.profiles[chat].gpus, facts.profiles[chat].start.remote_s) == (4, 9000.0)
    assert facts.demand[east] == (16500.0, 18200.0, 19000.0, 17400.0)
    assert facts.limits[east] == (2, 6)
    assert facts.overrides == {Endpoint(model="code-7b", region="us-west"): 2}
    assert facts.donated[EndpointGpu(model="chat-70b", region="us-east", gpu_type="H100")] == 1
    assert {model.name: model.tier for model in facts.models}["chat-70b"] == Tier.IW_F, "the strictest of its tiers"
    assert east in facts.weights_present, "an instance is there, so its weights are"
    assert Endpoint(model="chat-70b", region="us-west") not in facts.weights_present
    assert (how.epsilon, how.gap, how.time_limit_s) == (0.8, 0.001, 30.0)
    assert facts.pool is not None
    legal = EndpointGpu(model="legal-7b", region="us-west", gpu_type="L40S")
    load = PoolLoad(
        prefill_base_s=0.012,
        prefill_per_token_s=0.00012,
        decode_base_s=0.021,
        decode_per_context_token_s=2.4e-7,
        decode_per_sequence_s=0.0002,
        requests_per_s=0.012,
        input_tokens=1200,
        output_tokens=220,
        switch_s=0.9,
    )
    assert facts.pool.occupancy[legal] == occupancy_of(load).total
    assert facts.pool.occupancy[EndpointGpu(model="code-7b", region="us-east", gpu_type="L40S")] == 0.55


def test_pools_can_be_off() -> None:
    for change in (lambda d: d["pool"].update(on=False), lambda d: d.pop("pool")):
        assert parse(problem(change))[0].pool is None


def test_weights_that_are_given_are_all_there_are() -> None:
    facts, _ = parse(problem(lambda d: d.update(weights=[{"model": "code-7b", "region": "us-east"}])))
    assert facts.weights_present == {Endpoint(model="code-7b", region="us-east")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("demand"), "missing required field `demand`"),
        (lambda d: d.update(pools=1), "unknown field `pools`"),
        (lambda d: d["models"][1].update(size=1), r"unknown field `size` - at `\$.models\[1\]`"),
        (lambda d: d["gpus"][0].update(cost_per_hour=-1), r">= 0.0 - at `\$.gpus\[0\].cost_per_hour`"),
        (
            lambda d: d["gpus"][0]["gpus_per_region"].update(mars=1),
            r"\$.gpus\[0\].gpus_per_region\['mars'\]: 'mars' is",
        ),
        (lambda d: d["gpus"][0]["gpus_per_region"].update({"us-east": -1}), r"\['us-east'\]: must not be negative"),
        (lambda d: d["models"][0].update(tiers=["gold"]), r"'gold' - at `\$.models\[0\].tiers\[0\]`"),
        (lambda d: d["instance"][2].update(tokens_per_s=0), r"> 0.0 - at `\$.instance\[2\].tokens_per_s`"),
        (lambda d: d["instance"][0]["start_s"].update(local=-1), r"\$.instance\[0\].start_s.local"),
        (lambda d: d["instance"][3].update(gpu="B200"), r"\$.instance\[3\].gpu: 'B200' is unknown; known: H100, L40S"),
        (lambda d: d["present"][1].update(count=1.5), r"\$.present\[1\].count"),
        (lambda d: d["present"][5].update(gpu="H100"), r"\$.present\[5\]: \$.instance says nothing of archive-7b on"),
        (lambda d: d["spot"][0].update(region="mars"), r"\$.spot\[0\].region: 'mars' is unknown"),
        (lambda d: d["demand"][3].update(model="x"), r"\$.demand\[3\].model: 'x' is unknown"),
        (lambda d: d["demand"][3].update(tokens_per_s=[1, 2]), r"\$.demand\[3\].tokens_per_s: 2 windows, .* has 4"),
        (lambda d: d["demand"][3].update(tokens_per_s=[]), r"length >= 1 - at `\$.demand\[3\].tokens_per_s`"),
        (lambda d: d["demand"].append(d["demand"][0]), r"\$.demand\[9\]: chat-70b, us-east is given in \$.demand\[0\]"),
        (lambda d: d["limits"][0].update(min=9), r"\$.limits\[0\].min: 9 is above max 6"),
        (lambda d: d["pins"][0].update(count=-1), r"\$.pins\[0\].count"),
        (lambda d: d.update(epsilon=1.2), r"<= 1.0 - at `\$.epsilon`"),
        (lambda d: d.update(solver={"gap": 1}), r"< 1.0 - at `\$.solver.gap`"),
        (lambda d: d.update(prices={"unserved": {"NIW": 1}}), r"\$.prices.unserved: lacks IW-F, IW-N"),
        (lambda d: d["pool"].update(fill=0), r"\$.pool.fill"),
        (lambda d: d["pool"]["loads"][1].update(tbt_s=0), r"\$.pool.loads\[1\].tbt_s"),
        (lambda d: d["pool"]["loads"][1].update(input_tokens2=5), r"\$.pool.loads\[1\].input_tokens2 must be at least"),
        (lambda d: d["pool"]["loads"][0].update(model="code-7b"), r"\$.pool.loads\[0\]: \$.pool.occupancy says"),
        (lambda d: d["models"][3].pop("memory_bytes"), r"\$.models\[3\].memory_bytes: must be above 0"),
        (lambda d: d.update(regions=["us-east", "us-west", "us-east"]), r"\$.regions\[2\]: 'us-east' is given twice"),
        (lambda d: d["models"][2].update(name="chat-8b"), r"\$.models\[2\].name: 'chat-8b' is given twice"),
    ],
)
def test_a_refused_document_names_the_field(change: Change, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        parse(problem(change))


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(DocumentError, match="truncated"):
        parse("{")


@settings(max_examples=60)
@given(facts=small_facts(pools=True), epsilon=st.floats(0, 1))
def test_there_and_back(facts: PlacementFacts, epsilon: float) -> None:
    how = PlacementSettings(epsilon=epsilon, gap=0.01, time_limit_s=3.0, minimum_ratio=7.0, exact_cells_max=12)
    document = to_document(facts, how)
    again, settings_again = parse(json.dumps(document))
    assert settings_again == how
    assert to_document(again, settings_again) == document
    assert facts.pool is not None
    assert again.pool is not None
    here = {name: size for name, size in facts.pool.host_bytes_per_gpu.items() if size}
    assert again == replace(facts, pool=replace(facts.pool, host_bytes_per_gpu=here))


def test_the_schema_says_what_is_refused() -> None:
    definitions = schema()["$defs"]
    assert all(each["additionalProperties"] is False for each in definitions.values() if each.get("type") == "object")
    assert set(definitions["Problem"]["required"]) == {"regions", "gpus", "models", "instance", "demand"}
    assert definitions["Demand"]["properties"]["tokens_per_s"]["items"] == {"type": "number", "minimum": 0}
