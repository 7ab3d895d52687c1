"""A device whose copies run by themselves, with events that other processes wait for. There is no GPU in it.

As on CUDA a stream's thread only issues copies; a queue executes them later, and what waits for an event is executed
after it. A wait for an event that was not recorded ends at once. The events of a process are words in a file.
"""

import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

import torch

from dataplane.engines.torch.copies.base import Copy, Line
from dataplane.memory.events import Event

SLOTS = 1024
POLL_S = 0.0005
_present = threading.local()


class FakeQueue:
    """Executes in order what was issued to it, each as late as `delay_s` at most."""

    def __init__(self, rng: Random, delay_s: float) -> None:
        self._rng, self._delay_s = rng, delay_s
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fake device", daemon=True).start()

    def put(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def synchronize(self) -> None:
        """Block until all that was issued is executed."""
        executed = threading.Event()
        self.put(executed.set)
        executed.wait()

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            time.sleep(self._rng.uniform(0, self._delay_s))
            task()


class Issued:
    """The end of copies that a thread issues to a queue."""

    def __init__(self, issued: Event, passed: threading.Event) -> None:
        self._issued, self._passed = issued, passed

    def done(self) -> bool:
        return self._issued.done() and (self.error is not None or self._passed.is_set())

    def wait(self) -> None:
        """Block until they are issued, and let the queue of this thread wait for them, or this thread."""
        self._issued.wait()
        wait: Callable[[], object] = self._passed.wait
        own: FakeQueue | None = getattr(_present, "queue", None)
        if own is None:
            wait()
        else:
            own.put(lambda: _ignore(wait()))

    @property
    def error(self) -> BaseException | None:
        return self._issued.error


class FakeStream:
    """Meets `CopyStream`."""

    def __init__(self, name: str, rng: Random, delay_s: float) -> None:
        self._queue = FakeQueue(rng, delay_s)
        self._line = Line(name)

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        passed = threading.Event()

        def issue() -> None:
            _present.queue = self._queue
            try:
                for event in after:
                    event.wait()
            except BaseException:
                self._queue.synchronize()
                raise
            for copy in copies:
                self._queue.put(lambda copy=copy: _copy(copy))  # type: ignore[misc]
            self._queue.put(passed.set)

        return Issued(self._line.submit(issue), passed)

    def close(self) -> None:
        self._line.close()


class FakeEvents:
    """Meets `DeviceEvents`. `refuses`: other processes' events cannot be opened."""

    def __init__(self, file: Path, rng: Random, delay_s: float, *, refuses: bool = False) -> None:
        self._file, self._refuses = file, refuses
        file.write_bytes(bytes(2 * 8 * SLOTS))
        self._words = _words(file)
        self._queue = FakeQueue(rng, delay_s)

    def handle(self, slot: int) -> bytes:
        return f"{slot}:{self._file}".encode()

    def record(self, slot: int, transfer: Event) -> None:
        _present.queue = self._queue
        transfer.wait()
        number = self._words[2 * slot] + 1
        self._words[2 * slot] = number
        self._queue.put(lambda: self._pass(slot, number))

    def synchronize(self, slot: int) -> None:
        while self._words[2 * slot + 1] < self._words[2 * slot]:
            time.sleep(POLL_S)

    def wait_for(self, handle: bytes, source: torch.Tensor) -> bool:
        if self._refuses:
            return False
        words, slot = _opened(handle)
        number = words[2 * slot]
        own: FakeQueue = _present.queue
        own.put(lambda: _until(lambda: words[2 * slot + 1] >= number))
        return True

    def has_passed(self, handle: bytes) -> bool:
        words, slot = _opened(handle)
        return words[2 * slot + 1] >= words[2 * slot]

    def forget(self, handles: Iterable[bytes]) -> None:
        """Nothing is kept open."""

    def _pass(self, slot: int, number: int) -> None:
        self._words[2 * slot + 1] = number


def _opened(handle: bytes) -> tuple[memoryview, int]:
    slot, _, file = handle.decode().partition(":")
    return _words(Path(file)), int(slot)


def _words(file: Path) -> memoryview:
    opened = os.open(file, os.O_RDWR)
    try:
        return memoryview(mmap.mmap(opened, 0)).cast("Q")
    finally:
        os.close(opened)


def _copy(copy: Copy) -> None:
    copy.target.view(-1).view(torch.uint8).copy_(copy.source.view(-1).view(torch.uint8))


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(POLL_S)


def _ignore(_: object) -> None:
    """A task without a result."""
