"""The NIW queue: claims and results a second, by how much waits, beside two Postgres queues; and the ingest of a batch.

All queues share one embedded Postgres (fsync on) and run four processes. Ours does what a dispatcher does at each look:
`waiting_lots`, one `claim` for all that endpoints may take, one `finish` for the results. The others run their own
workers, with an empty task, and are measured only if they can be imported; neither is a dependency.
"""

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

import migrations
from ops.bench.queue_load import drain, fill, measure_counts_s, measure_ingest
from ops.bench.queue_peers import PEERS
from ops.commands.screen import AsJson, Columns, notes, print_json, print_table
from ops.embedded import EmbeddedPostgres
from ops.ports import free_port
from ops.supervisor import Supervisor

PROCESSES = 4


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One queue at one length: requests claimed and completed a second, the median of its rounds."""

    queue: str
    waiting: int
    per_s: float
    rounds: tuple[float, ...]


def main(
    waiting: Annotated[list[int], typer.Option(help="Rows that wait; may be given several times.")] = [  # noqa: B006
        10_000,
        1_000_000,
    ],
    peers_waiting: Annotated[list[int], typer.Option(help="... for the other queues.")] = [10_000],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="Longest time of a round.")] = 8.0,
    ingest_lines: Annotated[int, typer.Option(min=1)] = 50_000,
    as_json: AsJson = False,
) -> None:
    """Measure the queue.

    \b
    Examples:
      python -m ops.bench.queue
      python -m ops.bench.queue --waiting 10000 --waiting 10000000 --json
    """
    rates: list[Rate] = []
    for size in sorted(waiting):
        notes().print(f"tidepool, {size} rows")
        with _database() as url:
            migrations.upgrade(url)
            fill(url, size)
            found = []
            for _ in range(rounds):
                found.append(drain(url, PROCESSES, seconds))
                if size < 100_000:
                    fill(url, size)
            rates.append(Rate(queue="tidepool", waiting=size, per_s=median(found), rounds=tuple(found)))
    for name, peer in PEERS.items():
        if importlib.util.find_spec(name) is None:
            notes().print(f"{name} cannot be imported and is left out (pip install it, or set PYTHONPATH)")
            continue
        for size in sorted(peers_waiting):
            notes().print(f"{name}, {size} rows")
            with _database() as url:
                found = [peer(url, size, PROCESSES, seconds) for _ in range(rounds)]
            rates.append(Rate(queue=name, waiting=size, per_s=median(found), rounds=tuple(found)))
    notes().print(f"ingest of {ingest_lines} lines")
    with _database() as url, tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
        migrations.upgrade(url)
        found_ingest = [measure_ingest(url, Path(folder), ingest_lines) for _ in range(rounds)]
        ingest, ingest_cpu = (median(each) for each in zip(*found_ingest, strict=True))
        counts_s = measure_counts_s(url)
    if as_json:
        figures = {"ingest_lines_per_s": ingest, "ingest_lines_per_cpu_s": ingest_cpu, "counts_s": counts_s}
        print_json({"rates": [asdict(rate) for rate in rates], **figures})
        return
    columns: Columns = {"queue": "queue", "waiting": "waiting", "completed/s": lambda row: f"{row['per_s']:,.0f}"}
    print_table("Claim and complete, 4 processes", columns, [asdict(rate) for rate in rates])
    notes().print(f"ingest: {ingest:,.0f} lines/s, {ingest_cpu:,.0f} a second of its CPU time")
    notes().print(f"counts of a batch of {ingest_lines} results: {counts_s * 1000:.1f} ms")


@contextmanager
def _database() -> Iterator[str]:
    """A Postgres of its own; its address."""
    with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
        server = EmbeddedPostgres(Path(folder), free_port())
        server.prepare()
        with Supervisor([server.child()], report=lambda _: None):
            yield server.url()


if __name__ == "__main__":
    typer.run(main)
