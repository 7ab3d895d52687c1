"""Several API processes on one port: each listens to it, and the kernel spreads the connections over them.

Each keeps counts of its own, so whichever is asked for metrics collects those of all: it asks the others by sockets in
a folder that they share, and labels every series with its process.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from controlplane.errors import InvalidValueError

_ANSWERS_WITHIN_S = 2.0


@dataclass(frozen=True, kw_only=True)
class GroupMember:
    """One process of a group. `folder`: where each of them has a socket that is named after its `number`."""

    folder: Path
    number: int

    @property
    def socket_path(self) -> Path:
        """The socket at which this process tells the others its metrics."""
        return self.folder / f"{self.number}.sock"

    @contextlib.asynccontextmanager
    async def telling(self, metrics: Callable[[], bytes]) -> AsyncIterator[None]:
        """Tell the others this process's metrics while the block runs."""

        async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(metrics())
                await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(tell, self.socket_path)
        try:
            yield
        finally:
            server.close()
            self.socket_path.unlink(missing_ok=True)

    async def all_metrics(self, own: bytes) -> bytes:
        """The metrics of all processes that answer. `own`: those of this one."""
        paths = [path for path in sorted(self.folder.glob("*.sock")) if path != self.socket_path]
        answers = await asyncio.gather(*map(_ask, paths))
        others = {path.stem: answer for path, answer in zip(paths, answers, strict=True) if answer}
        return merged({str(self.number): own, **others})


async def _ask(path: Path) -> bytes:
    """What a process tells; nothing while it starts or ends."""
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return await reader.read(-1)
            finally:
                writer.close()
    except OSError:  # a timeout is one too
        return b""


def merged(metrics: Mapping[str, bytes]) -> bytes:
    """Metrics of several processes, in Prometheus's exposition format, as one: by process, whose name becomes the label
    `process` of its series.
    """
    families: dict[str, list[str]] = {}
    heads: dict[str, dict[str, str]] = {}
    for process, text in sorted(metrics.items()):
        name = ""
        for line in text.decode().removesuffix("\n").split("\n"):  # a label may hold other ends of lines
            if line.startswith("# "):
                _, word, name, about = line.split(" ", 3)
                heads.setdefault(name, {}).setdefault(word, about)
            else:
                families.setdefault(name, []).append(_labelled(line, process))
    lines = [
        line
        for name, about in heads.items()
        for line in (*(f"# {word} {name} {text}" for word, text in about.items()), *families.get(name, ()))
    ]
    return ("\n".join(lines) + "\n").encode()


def _labelled(sample: str, process: str) -> str:
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        return f'{sample[:brace]}{{process="{process}",{sample[brace + 1 :]}'
    return f'{sample[:space]}{{process="{process}"}}{sample[space:]}'


def bound_sockets(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """Sockets bound to every address of a host; `shared`: other processes may bind them too. They do not listen yet: a
    process that starts gets no connections before it can answer them.

    Raises:
        InvalidValueError: an address cannot be used, or the system cannot share a port.
    """
    found: list[socket.socket] = []
    try:
        for family, kind, _, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family, kind)
            found.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                _share(one)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except BaseException as error:
        for one in found:
            one.close()
        if isinstance(error, OSError):
            raise InvalidValueError(
                f"settings TIDEPOOL_HOST, TIDEPOOL_PORT: cannot listen at {host}, port {port}: {error.strerror}"
            ) from error
        raise
    return found


def _share(one: socket.socket) -> None:
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except (AttributeError, OSError) as error:
        raise InvalidValueError(
            f"api_processes: this system cannot share a port between processes (SO_REUSEPORT: {error}); use 1, or"
            " several gateways with a port each"
        ) from error
