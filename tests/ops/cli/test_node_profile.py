"""`tidepool node profile`: measured on a tiny model, or fitted to points in a file; what it writes can be read."""

import csv
import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from dataplane.scheduling.costs import LatencyModel
from dataplane.scheduling.profile import load_gpu_profile
from ops.profiling.checkpoints import BenchModel, Shape, build_checkpoints
from ops.profiling.published_points import COLUMNS, read_points
from ops.profiling.step_times import BATCHES, StepTimesSettings, grid, measure_step_times
from tests.ops.cli.running import Run

DATA = Path(os.environ.get("TIDEPOOL_DATA", Path(__file__).parents[4] / "shared" / "data")) / "aegaeon"
KNOWN = LatencyModel(
    prefill_base_s=5e-3,
    prefill_per_token_s=2e-5,
    prefill_per_token2_s=2e-10,
    decode_base_s=8e-3,
    decode_per_context_token_s=4e-8,
    decode_per_sequence_s=1e-4,
)
Row = dict[str, Any]


def rows(model: str = "some-7b", device: str = "H800", *, gpus: int = 1, chunk: int = 10**9) -> list[Row]:
    """Points of `KNOWN`; prefills run no more than `chunk` tokens."""
    return [
        {
            "set": "test",
            "model": model,
            "device": device,
            "tp": gpus,
            "input_len": length,
            "batch_size": batch,
            "prefill_avg_s": KNOWN.prefill_s(min(chunk, length * batch), min(chunk, length * batch) * length),
            "decode_avg_s": KNOWN.decode_s(length * batch, batch),
        }
        for length in (64, 256, 1024, 4096)
        for batch in (1, 2, 4, 16)
    ]


def save(path: Path, points: list[Row]) -> Path:
    with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(points[0]))
        writer.writeheader()
        writer.writerows(points)
    return path


@pytest.fixture
def profile(run: Run) -> Run:
    return lambda *arguments: run("node", "profile", *arguments)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> BenchModel:
    return build_checkpoints(tmp_path_factory.mktemp("models"), [Shape(hidden=64, layers=2, head_dim=16)], "float32")[0]


@pytest.mark.parametrize("name", ["points.csv", "points.csv.gz"])
def test_known_coefficients_are_written(profile: Run, tmp_path: Path, name: str) -> None:
    file = save(tmp_path / name, rows(gpus=2))
    out = tmp_path / "out.toml"
    assert (
        profile("--from", file, "--memory-gib", 80, "--pcie-gb-per-s", 26, "--cost-per-hour", 2.5, "--out", out).status
        == 0
    )
    written = load_gpu_profile(out)
    assert (written.gpu_type, written.memory_bytes, written.cost_per_hour) == ("H800", 80 * 2**30, 2.5)
    assert (written.pcie_bytes_per_s, written.transfer_efficiency) == (26e9, 0.625)
    [found] = written.models
    assert (found.name, found.source, found.gpus) == ("some-7b", "test/some-7b/H800/2", 2)
    assert found.weights_bytes == 14e9
    for key in LatencyModel.__dataclass_fields__:
        assert getattr(found.latency, key) == pytest.approx(getattr(KNOWN, key), rel=1e-3)
    assert "# prefill: R^2 1.0000, mean error 0.0%, 16 points" in out.read_text()


def test_points_beyond_a_chunk_are_dropped_where_only_the_chunk_ran(tmp_path: Path) -> None:
    whole, cut = read_points(save(tmp_path / "points.csv", [*rows(), *rows("cut-7b", chunk=4096)]))
    beyond = sum(point["input_len"] * point["batch_size"] > 4096 for point in rows())
    assert (whole.dropped, cut.dropped) == (0, beyond)
    assert len(cut.prefill) == len(cut.decode) == len(whole.prefill) - beyond
    assert max(point.tokens for point in cut.prefill) == 4096


@pytest.mark.parametrize(
    ("name", "weights_bytes"),
    [
        ("qwen_7b_chat", 14e9),
        ("qwen-1.8b-chat", 3.6e9),
        ("llama2_13b", 26e9),
        ("qwen1_5_moe_a2_7b_chat", None),
        ("opus", None),
    ],
)
def test_weights_follow_from_the_name_or_nobody_knows(tmp_path: Path, name: str, weights_bytes: float | None) -> None:
    [found] = read_points(save(tmp_path / "points.csv", rows(name)))
    assert found.weights_bytes == weights_bytes


@pytest.mark.skipif(not DATA.exists(), reason=f"no published latency profiles at {DATA} (set TIDEPOOL_DATA)")
def test_published_points_are_dropped_as_in_the_published_fits() -> None:
    with (DATA / "fitted_coefficients.csv").open(newline="") as file:
        used = {
            "/".join((row["set"], row["model"], row["device"], row["tp"])): int(row["n_used"])
            for row in csv.DictReader(file)
        }
    sets = read_points(DATA / "latency_profiles.csv.gz")
    assert {one.source: len(one.prefill) for one in sets} == used


def test_one_of_several_devices_is_chosen(tmp_path: Path, profile: Run) -> None:
    file = save(tmp_path / "points.csv", [*rows(), *rows(device="A10"), *rows("moe-7b", device="A10")])
    refused = profile("--from", file)
    assert (refused.status, "has points of A10, H800: say which GPU type" in refused.err) == (1, True), refused.err
    refused = profile("--from", file, "--gpu-type", "L4")
    assert (refused.status, "has no points of L4; it has A10, H800" in refused.err) == (1, True), refused.err
    outcome = profile("--from", file, "--gpu-type", "a10", "--json")
    answer = outcome.json
    assert answer["gpu"]["gpu_type"] == "A10"
    assert [found["source"] for found in answer["models"]] == ["test/some-7b/A10/1"]
    assert answer["models"][0]["fit"]["prefill_r2"] == pytest.approx(1.0)
    assert "left out test/moe-7b/A10/1" in outcome.err


def _without(name: str) -> list[Row]:
    return [{key: value for key, value in row.items() if key != name} for row in rows()]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([row | {"speed": 1} for row in rows()], "columns unknown speed; expected are set, model"),
        (_without("tp"), "columns missing tp; expected are"),
        ([row | {"input_len": "long"} for row in rows()], "line 2: invalid literal"),
        ([row | {"decode_avg_s": 0} for row in rows()], "test/some-7b/H800/1: a decode point took 0.0 s"),
        (rows()[:2], "2 prefill points; at least 3 are needed"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, profile: Run, points: list[Row], message: str) -> None:
    file, out = save(tmp_path / "points.csv", points), tmp_path / "out.toml"
    refused = profile("--from", file, "--memory-gib", 80, "--out", out)
    assert (refused.status, message in refused.err) == (1, True), refused.err
    assert not out.exists()


def test_a_file_that_is_not_what_it_says(tmp_path: Path, profile: Run) -> None:
    file = tmp_path / "points.csv.gz"
    file.write_text(",".join(COLUMNS))
    refused = profile("--from", file)
    assert (refused.status, "cannot be read" in refused.err) == (1, True), refused.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either checkpoints"),
        (["--from", "FILE", "FOLDER"], "give either checkpoints"),
        (["--from", "FILE", "--append"], "--append needs --out"),
        (["--from", "FILE", "--out", "new.toml"], "needs --memory-gib"),
        (["--from", "FILE", "--out", "new.toml", "--append"], "cannot be read"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path,
    profile: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"FILE": str(save(tmp_path / "points.csv", rows())), "FOLDER": str(tmp_path)}
    refused = profile(*(places.get(argument, argument) for argument in arguments))
    assert (refused.status, message in refused.err) == (1, True), refused.err


def test_models_are_appended_to_a_profile_of_the_same_gpu(tmp_path: Path, profile: Run) -> None:
    out = tmp_path / "out.toml"
    first = save(tmp_path / "first.csv", rows())
    assert profile("--from", first, "--memory-gib", 80, "--out", out).status == 0
    before = out.read_text()
    assert profile("--from", save(tmp_path / "more.csv", rows("more-13b")), "--out", out, "--append").status == 0
    assert out.read_text().startswith(before)
    assert [model.name for model in load_gpu_profile(out).models] == ["some-7b", "more-13b"]
    refused = profile("--from", save(tmp_path / "other.csv", rows(device="A10")), "--out", out, "--append")
    assert (refused.status, "is of H800, not of A10" in refused.err) == (1, True), refused.err


def test_a_model_is_measured_and_written(profile: Run, tmp_path: Path, model: BenchModel) -> None:
    out = tmp_path / "here.toml"
    arguments = ["--tokens-max", 128, "--seconds", 0, "--gpu-type", "this", "--out", out]
    assert profile(model.folder, *arguments).status == 0
    written = load_gpu_profile(out)
    assert written.gpu_type == "this"
    assert written.memory_bytes > 2**28
    assert written.pcie_bytes_per_s > 1e6
    [found] = written.models
    assert found.name == model.folder.name
    assert found.weights_bytes >= model.weights_bytes
    assert found.latency.prefill_s(64, 64**2) > 0


def test_step_times_cover_the_grid_in_order(model: BenchModel) -> None:
    told: list[str] = []
    times = measure_step_times(
        model.folder, StepTimesSettings(tokens_max=256, repeats=1), lambda doing, *_: told.append(doing)
    )
    shapes = grid(256, 4096)
    assert [point.tokens for point in times.prefill] == [length * batch for length, batch in shapes]
    assert [point.batch for point in times.decode] == [batch for _, batch in shapes]
    assert min(point.seconds for point in times.prefill) > 0
    assert min(point.seconds for point in times.decode) > 0
    assert told.index("prefill") < told.index("decode of 1 x 16 tokens")


def test_the_grid_keeps_to_its_limits() -> None:
    shapes = grid(1024, 300)
    assert {batch for _, batch in shapes} == set(BATCHES)
    assert {length for length, _ in shapes} == {16, 64, 256}, "a step needs room for one more token"
    assert all(length * batch <= 1024 for length, batch in shapes)
    assert [length * batch for length, batch in shapes] == sorted(length * batch for length, batch in shapes)
