"""Requests that come by several gateways are served as those by one, in a stack of real processes."""

import asyncio
from pathlib import Path

import pytest

from ops.bench.gateway.gateways import Load, measure

pytestmark = pytest.mark.slow


def test_requests_by_several_gateways_are_served(tmp_path: Path) -> None:
    """The bench raises if a request is not answered in full."""
    figures = asyncio.run(measure(tmp_path, 3, Load(instances=3, per_s=3, seconds=6), seed=1))
    assert figures["refused"] == 0
    late = figures["late"]
    assert late is not None
    assert late < 1
