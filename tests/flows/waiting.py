"""Waiting for something to become true, with a limit that only a defect reaches."""

import time
from collections.abc import Callable

LIMIT_S = 240.0


def wait_until(true: Callable[[], bool], what: str = "the condition", limit_s: float = LIMIT_S) -> None:
    """Poll until `true()`; an error after `limit_s` names `what`."""
    deadline_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.05)
