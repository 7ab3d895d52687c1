"""Priority requests overtake what queues on the only instance of their model, in a stack of real processes."""

import asyncio
from pathlib import Path

import pytest

from ops.bench.gateway.orders import measure

pytestmark = pytest.mark.slow


def test_priority_requests_wait_for_no_queue_of_others(tmp_path: Path) -> None:
    """The bench raises if a request is not answered in full."""
    by_deadline = asyncio.run(measure(tmp_path, "edf", 60, 0.2))
    priority_s, default_s = by_deadline["priority_mean_s"], by_deadline["default_mean_s"]
    assert priority_s is not None, "not all were refused"
    assert default_s is not None
    assert priority_s < default_s / 2
