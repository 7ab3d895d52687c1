"""The copy stream between host tensors."""

from collections.abc import Sequence

from dataplane.engines.torch.copies.base import Copy, Line, Movers, check_copies
from dataplane.memory.events import Event


class ThreadStream:
    """Copies between host tensors by a thread; with `threads` above 1, large copies are spread over that many."""

    def __init__(self, name: str, *, threads: int = 1) -> None:
        self._movers = Movers(name, threads)
        self._line = Line(name)

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        check_copies(copies)

        def run() -> None:
            for event in after:
                event.wait()
            self._movers.move(copies)

        return self._line.submit(run)

    def close(self) -> None:
        self._line.close()
        self._movers.close()
