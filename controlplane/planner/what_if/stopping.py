"""Whether this worker is asked to stop. Celery tells only its main process; a byte of shared memory tells its children,
which it forks.
"""

import mmap

_asked = mmap.mmap(-1, 1)


def note_stopping() -> None:
    """In the main process, also within a signal handler: the worker stops."""
    _asked[0] = 1


def is_stopping() -> bool:
    """In any process of the worker: whether it stops."""
    return _asked[0] == 1
