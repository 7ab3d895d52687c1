"""The benchmark of handovers, with a tiny model on a CPU."""

from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from ops.bench.engine import handover
from ops.profiling.checkpoints import Shape, build_checkpoints

TINY = Shape(hidden=64, layers=2, head_dim=16)


@pytest.mark.slow
def test_second_tokens_are_measured_by_how_their_kv_is_waited_for(tmp_path: Path) -> None:
    """A CPU has no events for a device to wait for."""
    [model] = build_checkpoints(tmp_path / "checkpoints", [TINY], "bfloat16", context_tokens=256)
    rows = list(
        handover.measure_waits(
            model,
            TINY,
            tmp_path,
            ways=("device", "host", "off"),
            device="cpu",
            dtype="bfloat16",
            requests=3,
            prompt_tokens=40,
            rounds=1,
        )
    )
    assert [row["kv_events"] for row in rows] == ["device", "host", "off"]
    assert all(0 < row["gap_s"] <= row["longest_s"] for row in rows)
    assert all(sum(row["waited_for"].values()) == 2 * 3 for row in rows)
    assert all(row["waited_for"]["device"] == 0 for row in rows)
    assert rows[2]["waited_for"]["host"] == 0
    assert not (tmp_path / "kv").exists()


def test_a_width_that_has_no_whole_heads_is_refused() -> None:
    app = Typer()
    app.command()(handover.main)
    refused = CliRunner().invoke(app, ["--hidden", "300"])
    assert (refused.exit_code, "must be a multiple of 256, not 300" in refused.stderr) == (2, True)
