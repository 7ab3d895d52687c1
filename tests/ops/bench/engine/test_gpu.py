"""The GPU benchmark, whose parts run on a CPU as well, with tiny models."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops.bench.engine import gpu, gpu_figures
from ops.bench.engine.gpu_sections import CHECKPOINTS, PLAN, SECTIONS, Plan, cpu_plan, main
from ops.bench.engine.gpu_tables import TABLES
from ops.profiling.checkpoints import BenchModel, Shape, build_checkpoints

TINY = Shape(hidden=64, layers=2, head_dim=16)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[BenchModel]:
    return build_checkpoints(tmp_path_factory.mktemp("models"), [TINY, TINY], "bfloat16", context_tokens=256)


def test_decode_steps_are_measured_against_the_bytes_that_they_read(
    models: list[BenchModel],
) -> None:
    same: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "rounds": 1, "prompt_tokens": 20, "step_tokens": 64}
    fast, slow = (
        list(gpu_figures.measure_decodes(models[0], TINY, sequences=(1, 3), bytes_per_s=rate, **same))
        for rate in (2e10, 1e10)
    )
    assert [row["sequences"] for row in fast] == [1, 3]
    for one, other in zip(fast, slow, strict=True):
        assert one["floor"] == pytest.approx(2 * other["floor"])
        assert one["share"] == pytest.approx(one["graphs"] / one["floor"])
        assert min(one["graphs"], one["no_graphs"]) > 0
    kv_bytes = 2 * 2 * 1 * 16 * 2 * 20
    assert slow[1]["floor"] == pytest.approx(3 * 1e10 / (models[0].weights_bytes + 3 * kv_bytes))


def test_products_of_packed_weights_are_measured_beside_dense_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_figures, "LAYERS", 2)
    found = list(gpu_figures.measure_products(device="cpu", rounds=1, rows=(1, 70), outputs=256, inputs=128))
    forms = [(form, rows) for form in gpu_figures.FORMATS for rows in (1, 70)]
    assert [(row["format"], row["rows"]) for row in found] == forms
    assert min(row["packed"] for row in found) > 0


def test_what_a_start_hides_is_told_where_something_can_be_hidden(models: list[BenchModel]) -> None:
    same: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "rounds": 1, "prompts": (16,), "step_tokens": 512}
    ((some,), (none,)) = (list(gpu_figures.measure_starts(models, load_s, **same)) for load_s in (0.0, 1e9))
    assert (some["prompt_tokens"], none["hidden"]) == (16, None)
    assert (
        some["hidden"] == pytest.approx((some["whole_s"] - some["layerwise_s"]) / (some["whole_s"] - some["run_s"]))
        or some["whole_s"] <= some["run_s"]
    )


def plan() -> Plan:
    return replace(cpu_plan(rounds=1, draws=1, vllm_python="/nowhere/python"), sequences=(1,), streams=(2,))


def test_switches_are_told_by_device_and_threads(models: list[BenchModel]) -> None:
    rows = list(
        gpu_figures.measure_switches(models, devices=["cpu", "cpu"], dtype="bfloat16", rounds=1, threads=(1, 2))
    )
    assert [row["threads"] for row in rows] == [1, 2, 1] * 2
    assert all(row["details"]["switch_s"] > 0 for row in rows)


def test_a_section_without_checkpoints_is_skipped_and_says_why(tmp_path: Path) -> None:
    (tmp_path / PLAN).write_bytes(msgspec.json.encode(plan()))
    main("switches", tmp_path)
    assert "no checkpoints" in json.loads((tmp_path / "switches.json").read_text())["skipped"]


def test_all_sections_have_a_table_and_fit_the_time_of_a_run() -> None:
    assert list(SECTIONS) == list(TABLES)
    assert sum(one.estimate_s for one in SECTIONS.values()) <= 580
    assert all(one.estimate_s < one.limit_s for one in SECTIONS.values())


def test_what_was_left_out_is_told_and_a_failed_test_is_a_failure() -> None:
    left = {"section": "switches", "status": "done", "found": {"skipped": ["a second device: there is one here"]}}
    late = {"section": "vllm", "status": "skipped", "why": "no time"}
    passed, broken = (
        {"section": "tests", "status": "done", "found": {"tests": [{"failures": each}]}} for each in ([], ["FAILED x"])
    )
    assert gpu.skipped_of([left, late, passed]) == [
        {"section": "switches", "what": "a second device", "why": "there is one here"},
        {"section": "vllm", "what": "skipped", "why": "no time"},
    ]
    assert not gpu.failed([left, late, passed])
    assert gpu.failed([left, broken])
    assert gpu.failed([{"section": "node", "status": "failed", "why": "it ended"}])


def test_servers_of_a_section_that_died_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The section is killed. Its server holds the pipe open, and would write into it after a while."""
    os.mkfifo(tmp_path / "pipe")
    section = tmp_path / "section"
    section.write_text(f"#!/bin/sh\nexec > {tmp_path}/pipe\n(sleep 20; echo still there) &\nkill -KILL $$\n")
    section.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(section))
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as pipe:
        (result,) = gpu.run_sections(["tests"], plan(), tmp_path, total_s=10_000)
        os.set_blocking(pipe.fileno(), True)
        assert not pipe.read()
    assert result["status"] == "failed"


@pytest.mark.slow
def test_a_section_that_fails_or_is_late_takes_nothing_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layer's inputs are no whole groups; there is no vLLM; the tests get no time to begin."""
    monkeypatch.setitem(gpu.SECTIONS, "tests", replace(SECTIONS["tests"], limit_s=0.001))
    names = [CHECKPOINTS, "vllm", "tests", "quantized"]
    results = gpu.run_sections(names, replace(plan(), product=(256, 100)), tmp_path, total_s=10_000)
    by_name = {result["section"]: result for result in results}
    expected = {"tests": "failed", "quantized": "failed", "vllm": "skipped"}
    assert {name: result["status"] for name, result in by_name.items()} == dict.fromkeys(names, "done") | expected
    assert "/nowhere/python" in by_name["vllm"]["why"]
    assert "not done after" in by_name["tests"]["why"]
    assert by_name["quantized"]["logs"]["quantized.log"]
    gpu.show({"note": gpu.CPU_NOTE, "device": "CPU"}, results)
    printed = capsys.readouterr()
    assert printed.out.count(gpu.CPU_NOTE) == 1
    assert "Left out or failed" in printed.out
    assert "quantized.log, the last lines" in printed.err
    (late,) = gpu.run_sections(["tests"], plan(), tmp_path, total_s=0)
    assert late["status"] == "skipped"
