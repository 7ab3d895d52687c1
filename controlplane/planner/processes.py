"""Celery's processes: workers, forecasters and beat, each until SIGTERM.

Celery's worker ends when it meets an error that it does not know, such as the acknowledgement of a task that was
running while Redis restarted (kombu 5.7.0 fails on the closed connection). A process that ends without having been told
to starts itself anew, with the same process id and nothing left of what broke it.
"""

import os
import sys
import time
from collections.abc import Callable

import structlog
from celery import signals

from controlplane.planner.schedule import MAIN_QUEUE, celery

log = structlog.get_logger()
_RESTART_AFTER_S = 1.0


def serve_worker(queue: str = MAIN_QUEUE) -> None:
    """Run a Celery worker until SIGTERM. Forecasts are long and many: workers of their own take them, so that scaling
    and measuring never wait behind them.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    told: list[str] = []

    def note_told(sig: str, **_: object) -> None:
        told.append(sig)

    def work() -> bool:
        celery.worker_main(
            [
                "--quiet",
                "worker",
                "--concurrency=2",
                "--without-gossip",
                "--without-mingle",
                f"--queues={queue}",
            ]
        )
        return bool(told)

    signals.worker_shutting_down.connect(note_told, weak=False)
    _run_until_told(work)


def serve_beat() -> None:
    """Run the clock until SIGTERM."""

    def tick() -> bool:
        celery.start(["--quiet", "beat"])
        return True  # beat returns when it was told to stop, and raises otherwise

    _run_until_told(tick)


def _run_until_told(run: Callable[[], bool]) -> None:
    """Run Celery; `run` says whether it ended because it was told to. Otherwise start this process anew."""
    try:
        if run():
            return
    except Exception:
        log.exception("Celery failed")
    log.error("Celery ended without having been told to; starting anew", after_s=_RESTART_AFTER_S)
    time.sleep(_RESTART_AFTER_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - no shell is wanted
