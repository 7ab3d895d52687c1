"""`tidepool model`."""

from pathlib import Path

import pytest

from controlplane.policies.facts import EndpointGpu, ModelGpu
from controlplane.policies.latency_comparison import LatencyComparison
from controlplane.policies.profile_correction import Correction
from controlplane.policies.step_correction import StepCorrection
from controlplane.store.latency_comparisons import put_comparisons
from controlplane.store.profile_corrections import put_correction
from controlplane.store.session import Database
from tests.controlplane.planner.test_compare import a_measurement
from tests.dataplane.registry import Registry
from tests.ops.cli.running import Run
from tests.ops.local.test_checkpoints import write_checkpoint

STEPS = StepCorrection(prefill_factor=1.1, decode_factor=1.0, reason="prefills take longer")
PROFILES = Path(__file__).parents[3] / "ops" / "profiles"


def test_latency_comes_from_gpu_profiles(served: Run, tmp_path: Path) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder, rate = write_checkpoint(tmp_path / "m"), ("--tokens-per-s", "H800=1200")
    made = served("model", "add", "m", "--path", folder, *rate, "--latency", PROFILES / "h800.toml", "--json").json
    [profile] = made["profiles"]
    assert profile["latency"]["source"].startswith("7B on 1 H800: profiles/")
    assert profile["latency"]["decode_base_s"] == pytest.approx(8.4524e-03)
    assert profile["latency"]["switch_s"] == pytest.approx(96 / (55.6e9 * 0.625)), "its own 96 bytes, not the 7B's"
    assert "7B on 1 H800" in served("model", "show", "m").out
    assert served("model", "profile", "m", *rate, "--json").json[0]["latency"] is None
    assert "never pooled" in served("model", "show", "m").out
    refused = served("model", "profile", "m", *rate, "--latency", PROFILES / "h20.toml")
    assert (refused.status, "is of H20" in refused.err) == (2, True)
    (tmp_path / "bad.toml").write_text((PROFILES / "h800.toml").read_text().replace("8.4524e-03", "-1.0"))
    broken = served("model", "profile", "m", *rate, "--latency", tmp_path / "bad.toml")
    assert broken.status == 1
    assert "models[0]: decode_base_s must be at least 0" in broken.err


def test_latency_may_be_a_guess(served: Run, tmp_path: Path) -> None:
    for name in ("H800", "odd"):
        served("gpu", "add", name, "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder, rate = write_checkpoint(tmp_path / "m"), ("--tokens-per-s", "H800=1200")
    made = served("model", "add", "m", "--path", folder, *rate, "--latency", "auto", "--json").json
    [profile] = made["profiles"]
    assert profile["latency"]["source"] == "a guess for H800, until `tidepool node profile` has measured it"
    assert profile["latency"]["switch_s"] == pytest.approx(96 / (55.6e9 * 0.625))
    both = ("--latency", "auto", "--latency", PROFILES / "h800.toml")
    [measured] = served("model", "profile", "m", *rate, *both, "--json").json
    assert measured["latency"]["source"].startswith("7B on 1 H800"), "a file goes before a guess"
    [of_two] = served("model", "profile", "m", *rate, "--gpus", 2, "--latency", "auto", "--json").json
    assert of_two["latency"]["source"].startswith("a guess for 2 H800")
    refused = served("model", "profile", "m", "--tokens-per-s", "odd=1200", "--latency", "auto")
    assert (refused.status, "auto does not know the GPU type odd, only A10, A100" in refused.err) == (2, True)


def test_a_corrected_profile_is_shown_with_its_reason_and_reset(
    served: Run, tmp_path: Path, database: Database
) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder = write_checkpoint(tmp_path / "m")
    assert served("model", "add", "m", "--path", folder, "--tokens-per-s", "H800=1200").status == 0
    assert "by what instances do" not in served("model", "show", "m").out
    correction = Correction(factor=0.75, reason="instances were full", estimate=888.0, windows=72)
    with database.transaction() as session:
        put_correction(session, ModelGpu(model="m", gpu_type="H800"), correction, STEPS, stated_tokens_per_s=1200.0)
    shown = served("model", "show", "m").out
    assert all(text in shown for text in ("900", "888", "instances were full"))
    assert served("model", "show", "m", "--json").json["corrections"][0]["tokens_per_s"] == 900
    reset = served("model", "reset-profile", "m", "H800")
    assert reset.out == "m on H800 counts 1,200 tokens/s, as stated, until there is new evidence\n"
    assert served("model", "reset-profile", "m", "H800").err == (
        "error: profile correction 'm in H800' is not registered (404)\n"
    )


def test_latency_is_shown_beside_what_the_profile_predicts(served: Run, tmp_path: Path, database: Database) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    assert (
        served("model", "add", "m", "--path", write_checkpoint(tmp_path / "m"), "--tokens-per-s", "H800=1").status == 0
    )
    assert "beside what the profile predicts" not in served("model", "show", "m").out
    comparison = LatencyComparison(predicted=None, differs=False, reason="the profile states no step times")
    with database.transaction() as session:
        at = EndpointGpu(model="m", region="us-east", gpu_type="H800")
        put_comparisons(session, {at: (a_measurement(), comparison)})
    shown = " ".join(served("model", "show", "m").out.split())
    assert "beside what the profile predicts" in shown
    assert "IW-F 100 and 300 ms" in shown
    assert "the profile states no step times" in shown
    assert served("model", "show", "m", "--json").json["latencies"][0]["tbt_s"] == 0.04


def test_engine_rates_are_kept_with_the_profile(served: Run, tmp_path: Path) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder, rate = write_checkpoint(tmp_path / "m"), ("--tokens-per-s", "H800=1200")
    assert served("model", "add", "m", "--path", folder, *rate, "--engine-rates", "H800=9000,15000").status == 0
    assert "torch 9000, vLLM 15000 tokens/s" in served("model", "show", "m").out
    assert "engines: not measured" in served("model", "profile", "m", *rate).out
    for wrong in ("H800", "H800=1", "H800=1,2,3", "H800=1,0", "H20=1,2"):
        refused = served("model", "profile", "m", *rate, "--engine-rates", wrong)
        assert (refused.status, "--engine-rates" in refused.err) == (2, True), wrong


def test_refusals_name_the_field_and_make_nothing(served: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    outcome = served("model", "add", "m", "--path", folder, "--region", "mars")
    assert outcome.status == 1
    assert outcome.err == "error: region 'mars' is not registered (404)\n"
    assert outcome.out == ""
    assert served("model", "list", "--json").json["data"] == []
    outcome = served("model", "add", "m", "--path", tmp_path / "none")
    assert (outcome.status, "is no folder" in outcome.err) == (1, True)
    assert "name:" in served("region", "add", "US").err
    assert "(401)" in served("--key", "wrong", "region", "list").err


def test_a_model_is_added_with_a_rate_or_has_a_profile_already(served: Run, tmp_path: Path) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder = write_checkpoint(tmp_path / "tiny")
    outcome = served("model", "add", "m", "--path", folder)
    assert outcome.status == 1
    assert "--tokens-per-s GPU=NUMBER is missing, and m has no profile yet" in outcome.err
    assert "tidepool node profile" in outcome.err
    assert served("model", "list", "--json").json["data"] == []
    served("model", "add", "m", "--path", folder, "--tokens-per-s", "H800=1200")
    again = served("model", "add", "m", "--path", folder, "--slo", "IW-F=0.5,0.05")
    assert (again.status, "profiles: H800" in again.out) == (0, True)


def test_a_model_may_lie_in_a_registry(served: Run, tmp_path: Path) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    registry = Registry.of(write_checkpoint(tmp_path / "tiny"))
    given = ("--path", registry.url, "--tokens-per-s", "H800=1200", "--private-host", "127.0.0.1")
    made = served("model", "add", "m", *given, "--json").json
    assert (made["model"]["path"], made["model"]["weights_bytes"]) == (registry.url, 96)
    registry.answers = [404]
    outcome = served("model", "add", "m", *given)
    assert (outcome.status, outcome.err) == (1, f"error: {registry.url}manifest.json answers 404\n")
    registry.close()


def test_a_model_is_added_with_the_parsers_of_its_answers(served: Run, tmp_path: Path) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    given = ("--path", write_checkpoint(tmp_path / "m"), "--tokens-per-s", "H800=1200")
    served("model", "add", "m", *given)
    assert served("model", "show", "m").out.count("as its chat template suggests") == 2
    served("model", "add", "m", *given, "--tool-parser", "llama3_json", "--reasoning-parser", "none")
    shown = served("model", "show", "m").out
    assert "llama3_json" in shown
    outcome = served("model", "add", "m", *given, "--tool-parser", "bark")
    assert (outcome.status, "--tool-parser must be one of hermes" in outcome.err) == (2, True)


def test_the_task_is_that_of_the_checkpoint_or_the_one_that_is_given(served: Run, tmp_path: Path) -> None:
    served("gpu", "add", "H800", "--memory-gib", 80, "--cost-per-hour", 2.5)
    folder, rate = write_checkpoint(tmp_path / "m", architectures=["Qwen3Model"]), ("--tokens-per-s", "H800=1200")
    added = served("model", "add", "m", "--path", folder, *rate)
    assert "Qwen3Model to embed" in added.out
    assert served("model", "list", "--json").json["data"][0]["task"] == "embed"
    given = served("model", "add", "m", "--path", folder, "--task", "generate", "--json")
    assert given.json["model"]["task"] == "generate"
    refused = served("model", "add", "m", "--path", folder, "--task", "dream")
    assert (refused.status, "--task must be one of generate, embed, score" in refused.err) == (2, True)
