"""In bfloat16 several ranks make the tokens of transformers, and so those of one rank, but for ties: `node check`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.engines.torch import engine
from ops.profiling.exactness import check_models
from ops.profiling.interleaving import CheckSettings
from tests.dataplane.engines.torch.rank_threads import start_threads
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, save_tiny

SOME = ("llama", "gemma2", "qwen3_moe")
ROWS_OF_FOUR = {"mixtral": {"intermediate_size": 64}, "qwen3_moe": {"moe_intermediate_size": 64}}
"""Sizes of experts that four ranks can divide, in bfloat16."""


@pytest.mark.parametrize(
    ("ranks", "architectures"),
    [
        pytest.param(2, SOME, id="2"),
        *(pytest.param(ranks, ARCHITECTURES, id=f"{ranks}-all", marks=pytest.mark.slow) for ranks in (1, 2, 4)),
    ],
)
def test_tokens_are_those_of_transformers_but_for_ties(
    ranks: int,
    architectures: tuple[str, ...],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the models take turns in memory for one, with preemption."""
    folders = [
        save_tiny(name, tmp_path / name, **ROWS_OF_FOUR[name]) if name in ROWS_OF_FOUR else checkpoint(name)
        for name in architectures
    ]
    monkeypatch.setattr(engine, "start_processes", start_threads)
    settings: Any = {"device": "cpu", "dtype": "bfloat16", "switches": len(folders), "prompts": 2, "tokens": 6}
    report = check_models(folders, CheckSettings(**settings, ranks=ranks), lambda *_: None)
    assert {one.model: one.mismatches for one in report.models if one.mismatches} == {}
    assert sorted(one.architecture for one in report.models) == sorted(architectures)
    assert all(one.tokens > 0 for one in report.models)
    assert 10 * sum(one.ties + one.router_ties for one in report.models) <= sum(one.tokens for one in report.models)
