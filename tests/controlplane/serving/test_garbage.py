"""What a gateway's garbage collector is spared, and what it still finds."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from controlplane.serving.garbage import collect_less_often


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


class _Ring:
    def __init__(self) -> None:
        self.itself = self


def test_what_a_process_holds_at_its_start_is_never_looked_at_again() -> None:
    held = _Ring()
    collect_less_often()

    assert gc.get_freeze_count() > 0
    assert not any(each is held for each in gc.get_objects())


def test_cycles_that_requests_leave_behind_are_still_freed() -> None:
    collect_less_often()
    first = weakref.ref(_Ring())

    kept = [[] for _ in range(3 * gc.get_threshold()[0])]  # type: ignore[var-annotated]

    assert kept
    assert first() is None
