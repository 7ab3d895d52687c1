"""How many round trips to Postgres something takes, counted on the wire."""

import socket
import threading
import time
from collections.abc import Callable

from sqlalchemy import make_url

from ops.local.ports import LOOPBACK

_DELAY_S = 0.02
"""Of each answer, so that what was sent without waiting for it has arrived before."""


class TripCounter:
    """A proxy before the Postgres at `url` that counts how often a client sends after it was answered. `at`: the
    address of the proxy.
    """

    def __init__(self, url: str) -> None:
        server = make_url(url)
        self._target = (server.host or LOOPBACK, server.port or 5432)
        self._listener = socket.create_server((LOOPBACK, 0))
        self.at = server.set(host=LOOPBACK, port=self._listener.getsockname()[1]).render_as_string(hide_password=False)
        self._lock = threading.Lock()
        self._count = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def least(self, call: Callable[[], object], *, rounds: int = 6) -> int:
        """The fewest trips of several calls: those of the process's own loops, and of new connections, only add."""
        return min(self._trips_of(call) for _ in range(rounds))

    def close(self) -> None:
        self._listener.close()

    def _trips_of(self, call: Callable[[], object]) -> int:
        before = self._count
        call()
        return self._count - before

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            answered = threading.Event()
            answered.set()
            for copy in (self._ask, self._answer):
                threading.Thread(target=copy, args=(client, server, answered), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket, answered: threading.Event) -> None:
        while data := _read(client):
            if answered.is_set():
                answered.clear()
                with self._lock:
                    self._count += 1
            _write(server, data)
        server.close()

    def _answer(self, client: socket.socket, server: socket.socket, answered: threading.Event) -> None:
        while data := _read(server):
            time.sleep(_DELAY_S)
            answered.set()
            _write(client, data)
        client.close()


def _read(source: socket.socket) -> bytes:
    try:
        return source.recv(65536)
    except OSError:
        return b""


def _write(target: socket.socket, data: bytes) -> None:
    try:
        target.sendall(data)
    except OSError:
        target.close()
