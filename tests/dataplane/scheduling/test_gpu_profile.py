"""GPU profiles: those that come with Tidepool are sound, and a bad one is refused by key."""

from pathlib import Path

import pytest

from dataplane.scheduling.profile import ProfileError, load_gpu_profile

PROFILES = Path(__file__).parents[3] / "ops" / "profiles"

GOOD = """
gpu_type = "X"
memory_bytes = 1000
pcie_bytes_per_s = 10.0
transfer_efficiency = 0.5
cost_per_hour = 1.0

[[models]]
name = "tiny"
source = "made up"
gpus = 1
weights_bytes = 100
prefill_base_s = 0.1
prefill_per_token_s = 0.01
prefill_per_token2_s = 0
decode_base_s = 0.1
decode_per_context_token_s = 0.0
decode_per_sequence_s = 0.0
"""


@pytest.mark.parametrize("name", ["h800", "h20"])
def test_shipped_profiles_load(name: str) -> None:
    profile = load_gpu_profile(PROFILES / f"{name}.toml")
    assert profile.gpu_type == name.upper()
    assert profile.memory_bytes > 70e9
    assert {model.name for model in profile.models} >= {"7B", "13B"}
    assert all(model.weights_bytes < profile.memory_bytes * model.gpus for model in profile.models)


def test_a_profile_of_one_model_that_was_read_off_published_latencies() -> None:
    latency = load_gpu_profile(PROFILES / "a100-gpt-oss.toml").nearest_model(1).latency
    assert latency.prefill_s(512, 512**2) == pytest.approx(0.030, rel=0.05)
    for sequences, step_s in ((12, 0.0097), (46, 0.0132), (207, 0.023)):
        assert latency.decode_s(0, sequences) == pytest.approx(step_s, rel=0.1)


def test_h800_prefills_faster_than_h20() -> None:
    h800, h20 = (load_gpu_profile(PROFILES / f"{name}.toml").nearest_model(15 * 10**9) for name in ("h800", "h20"))
    assert h800.latency.prefill_s(1024, 1024**2) < h20.latency.prefill_s(1024, 1024**2)


def test_nearest_model_is_by_ratio_and_gpus() -> None:
    profile = load_gpu_profile(PROFILES / "h800.toml")
    assert profile.nearest_model(1).name == "7B"
    assert profile.nearest_model(10**12).name == "14B"
    assert profile.nearest_model(10**9, gpus=2).name == "14B-TP2"
    assert profile.nearest_model(10**9, gpus=8).name == "7B"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("memory_bytes = 1000", "", "memory_bytes is missing"),
        ("memory_bytes = 1000", 'memory_bytes = "1000"', "memory_bytes must be a number"),
        ("memory_bytes = 1000", "memory_bytes = 0", "memory_bytes must be over 0"),
        ("transfer_efficiency = 0.5", "transfer_efficiency = 1.5", "transfer_efficiency must be over 0 and at most 1"),
        ('gpu_type = "X"', "gpu_type = 3", "gpu_type must be a text"),
        ("decode_base_s = 0.1", "decode_base_s = -0.1", r"models\[0\]: decode_base_s must be at least 0"),
        ("decode_base_s = 0.1", "decode_base_s = true", r"models\[0\]: decode_base_s must be a number"),
        ("weights_bytes = 100", "weights_bytes = 100\ncolour = 3", r"models\[0\]: unknown key colour"),
        ("[[models]]", "[models]", "models must be a list"),
        ("cost_per_hour = 1.0", "cost_per_hour = ", "is not TOML"),
    ],
)
def test_bad_profiles_name_the_key(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    path = tmp_path / "bad.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ProfileError, match=complaint):
        load_gpu_profile(path)


def test_a_missing_profile_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nowhere\.toml"):
        load_gpu_profile(tmp_path / "nowhere.toml")
