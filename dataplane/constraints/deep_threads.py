"""Threads with a stack that the grammar library does not exhaust: it recurses as deep as a definition refers."""

import threading
from concurrent.futures import ThreadPoolExecutor

STACK_BYTES = 64 * 2**20
"""Eight times what the process that checks definitions has, which dies of definitions that need more."""


def deep_threads(count: int, name: str, *, stack_bytes: int = STACK_BYTES) -> ThreadPoolExecutor:
    """A pool whose threads are started, so that none is started later with another stack."""
    pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix=name)
    all_started = threading.Barrier(count + 1)
    before = threading.stack_size(stack_bytes)
    try:
        for _ in range(count):
            pool.submit(all_started.wait)
    finally:
        threading.stack_size(before)
    all_started.wait()
    return pool
