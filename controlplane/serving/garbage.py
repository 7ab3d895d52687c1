"""Garbage collection of a process that answers many short requests."""

import gc

_ALLOCATIONS = 20_000
"""Objects made and not freed before the youngest generation is collected: those of about a hundred requests."""


def collect_less_often() -> None:
    """Leave what the process holds now out of every later collection, and collect less often.

    Reference counts free nearly all that a request made; only cycles are left to the collector. Its default threshold,
    700 objects, is reached by two requests, and most of what it then looks at belongs to requests that still run.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, *gc.get_threshold()[1:])
