"""Celery's processes: workers, forecasters and beat, each until SIGTERM.

Celery's worker ends when it meets an error that it does not know, such as the acknowledgement of a task that was
running while Redis restarted (kombu 5.7.0 fails on the closed connection). A process that ends without a signal
executes itself again, with the same process id and fresh state.
"""

import os
import sys
import time
from collections.abc import Callable

import structlog
from celery import signals

from controlplane.planner.schedule import MAIN_QUEUE, celery
from controlplane.planner.what_if.stopping import note_stopping

log = structlog.get_logger()


def serve_worker(*queues: str, concurrency: int = 2, restart_after_s: float = 1.0) -> None:
    """Run a Celery worker until SIGTERM. Forecasts and what-if runs, long and many, have workers of their own, so that
    scaling and measuring never wait for them. No queue given: the main one.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signalled: list[str] = []

    def note_signal(sig: str, **_: object) -> None:
        signalled.append(sig)
        note_stopping()

    def work() -> bool:
        celery.worker_main(
            [
                "--quiet",
                "worker",
                f"--concurrency={concurrency}",
                "--without-gossip",
                "--without-mingle",
                f"--queues={','.join(queues or (MAIN_QUEUE,))}",
            ]
        )
        return bool(signalled)

    signals.worker_shutting_down.connect(note_signal, weak=False)
    _run_until_signalled(work, restart_after_s)


def serve_beat(*, restart_after_s: float = 1.0) -> None:
    """Run the clock until SIGTERM."""

    def tick() -> bool:
        celery.start(["--quiet", "beat"])
        return True  # beat returns on a signal, and raises otherwise

    _run_until_signalled(tick, restart_after_s)


def _run_until_signalled(run: Callable[[], bool], restart_after_s: float) -> None:
    """Run Celery; `run` returns whether a signal ended it. Otherwise execute this process again."""
    try:
        if run():
            return
    except Exception:
        log.exception("Celery failed")
    log.error("Celery ended without a signal; restarting", after_s=restart_after_s)
    time.sleep(restart_after_s)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - no shell is wanted
