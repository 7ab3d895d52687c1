"""What open consoles cost a gateway: its share of a core with none, one and many of them on the stream of events."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from ops.bench.console.fleet import LARGE, SMALL, Filled, FleetSize
from ops.bench.console.large_fleet import filled_gateway
from ops.bench.gateway.stack import GatewayProcess
from ops.bench.shared import chosen, cpu_s
from ops.client.screen import AsJson, Columns, notes, print_json, print_table

SIZES = {"large": LARGE, "small": SMALL}
_SETTLE_S = 5.0
_COLUMNS: Columns = {
    "fleet": "fleet",
    "consoles": "consoles",
    "gateway, % of a core": lambda row: f"{100 * row['gateway_share']:.2f}",
    "more than none": lambda row: f"{100 * row['more_share']:.2f}",
    "Postgres": lambda row: f"{100 * row['postgres_share']:.2f}",
    "events a second to each": lambda row: f"{row['events_per_s']:.2f}",
    "KB/s to each": lambda row: f"{row['bytes_per_s'] / 1000:.1f}",
}


@dataclass(frozen=True, kw_only=True)
class Share:
    """With so many consoles open. `more_share`: of the gateway, beyond its share with none."""

    fleet: str
    consoles: int
    gateway_share: float
    more_share: float
    postgres_share: float
    events_per_s: float
    bytes_per_s: float


class _Console:
    """A reader of the stream, who counts what comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.events = 0
        self.bytes = 0
        self.reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 16):
            self.bytes += len(data)
            self.events += data.count(b"event: overview\n")

    async def close(self) -> None:
        self.reading.cancel()
        self.writer.close()
        await asyncio.gather(self.reading, return_exceptions=True)


async def open_console(gateway: GatewayProcess[Filled]) -> _Console:
    """Follow the stream as an open console does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    asked = f"GET /admin/live HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.filled.viewer_key}\r\n\r\n"
    writer.write(asked.encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.splitlines()[0]:
        raise RuntimeError(f"the stream was refused: {head.decode()}")
    return _Console(reader, writer)


async def measure(gateway: GatewayProcess[Filled], fleet: str, counts: Sequence[int], seconds: float) -> list[Share]:
    """The shares with each number of consoles; the first is zero."""
    found: list[Share] = []
    for count in counts:
        consoles = [await open_console(gateway) for _ in range(count)]
        await asyncio.sleep(_SETTLE_S)
        pids = gateway.pid, gateway.servers["postgres"]
        began = [cpu_s(pid) for pid in pids]
        seen = [(each.events, each.bytes) for each in consoles]
        await asyncio.sleep(seconds)
        own, postgres = ((cpu_s(pid) - before) / seconds for pid, before in zip(pids, began, strict=True))
        events = sum(each.events - before for each, (before, _) in zip(consoles, seen, strict=True))
        sent = sum(each.bytes - before for each, (_, before) in zip(consoles, seen, strict=True))
        await asyncio.gather(*(each.close() for each in consoles))
        found.append(
            Share(
                fleet=fleet,
                consoles=count,
                gateway_share=own,
                more_share=own - found[0].gateway_share if found else 0.0,
                postgres_share=postgres,
                events_per_s=events / max(1, count) / seconds,
                bytes_per_s=sent / max(1, count) / seconds,
            )
        )
    return found


def main(
    fleets: Annotated[list[str] | None, typer.Option("--fleet", help=f"Any of {', '.join(SIZES)}; else all.")] = None,
    consoles: Annotated[list[int] | None, typer.Option(min=1, help="How many are open; else 1, then 200.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each measurement.")] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Measure what open consoles cost a gateway that does nothing else.

    \b
    Examples:
      python -m ops.bench.console.watchers
      python -m ops.bench.console.watchers --fleet large --consoles 1 --consoles 50 --seconds 30 --json
    """
    names = chosen(fleets, SIZES, "--fleet")
    found: list[Share] = []
    for name in names:
        size: FleetSize = SIZES[name]
        with filled_gateway(size) as gateway:
            notes().print(f"measuring the {name} fleet")
            found += asyncio.run(measure(gateway, name, [0, *(consoles or (1, 200))], seconds))
    rows = list(map(asdict, found))
    if as_json:
        print_json({"shares": rows})
    else:
        print_table(f"Open consoles, {seconds:g} s each", _COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
