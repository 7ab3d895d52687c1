"""The other ranks of a slot as threads of the test, over gloo: quicker to start than processes, and otherwise alike."""

import socket
import threading

from dataplane.engines.torch.ranks.follower import follow
from dataplane.engines.torch.ranks.processes import OtherRanks, new_meeting, shut_down


def start_threads(count: int) -> OtherRanks:
    """A thread each. What it raises is raised when the slot is closed. Those of a test that fails before it closes its
    slot do not keep the process of the tests from ending.
    """
    pairs = [socket.socketpair() for _ in range(count)]
    failures: list[BaseException] = []

    def run(end: socket.socket) -> None:
        with end:
            try:
                follow(end, at_end=lambda: None)
            except BaseException as error:
                failures.append(error)
                raise

    threads = [
        threading.Thread(target=run, args=(end,), name=f"rank-{n}", daemon=True) for n, (_, end) in enumerate(pairs, 1)
    ]
    for thread in threads:
        thread.start()

    connections = tuple(ours for ours, _ in pairs)

    def end() -> None:
        shut_down(connections)
        for thread in threads:
            thread.join()
        for failure in failures:
            raise failure

    return OtherRanks(connections=connections, end=end, meeting=new_meeting())
