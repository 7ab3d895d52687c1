"""Recordings of a few requests, for what compares remapping with other actions."""

import gzip
from pathlib import Path

import pytest

from ops.bench.papers.remapping_sim import ARRIVALS, WORKLOADS


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [f"2023-11-16 18:{minute:02d}:00.0,100,10" for minute in range(40)]
    files = {
        ARRIVALS: ["TIMESTAMP,ContextTokens,GeneratedTokens", *lines],
        WORKLOADS: ["workload,input_len,output_len", *["synth-40-0.7-1.0-1.0,900,200"] * 5],
    }
    for name, rows in files.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_bytes(gzip.compress("\n".join(rows).encode()))
    return tmp_path
