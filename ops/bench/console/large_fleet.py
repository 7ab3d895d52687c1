"""What the console's pages cost on a large fleet: every endpoint they ask, and, where there is a browser, the pages."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import httpx2 as httpx
import typer

from ops.bench.console.browser import PageFigures, measure_pages, why_no_browser
from ops.bench.console.fleet import Filled, FleetSize, fill_large
from ops.bench.gateway.stack import GatewayProcess, gateway_process
from ops.bench.shared import cpu_s, work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table

_TIMEOUT_S = 120.0
_COLUMNS: Columns = {
    "endpoint": "path",
    "latency, ms": lambda row: f"{1000 * row['latency_s']:.0f}",
    "slowest": lambda row: f"{1000 * row['slowest_s']:.0f}",
    "gateway CPU, ms": lambda row: f"{1000 * row['cpu_s']:.0f}",
    "Postgres CPU, ms": lambda row: f"{1000 * row['postgres_cpu_s']:.0f}",
    "KB": lambda row: f"{row['bytes'] / 1000:.1f}",
}
_PAGE_COLUMNS: Columns = {
    "page": "page",
    "shown after, ms": lambda row: f"{row['shown_ms']:.0f}",
    "interactive": lambda row: f"{row['interactive_ms']:.0f}",
    "KB loaded": lambda row: f"{row['loaded_bytes'] / 1000:.0f}",
    "long tasks while scrolling": "long_tasks",
    "longest, ms": lambda row: f"{row['longest_task_ms']:.0f}",
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one endpoint, medians of its rounds but for the slowest; CPU seconds are the mean of a call."""

    path: str
    latency_s: float
    slowest_s: float
    cpu_s: float
    postgres_cpu_s: float
    bytes: int


def paths_of(filled: Filled) -> list[str]:
    """What the console's pages ask, as they ask it."""
    plan = f"/admin/plans/{filled.plan_drafted}"
    return [
        "/admin/overview",
        "/admin/plans?limit=50",
        f"{plan}/summary",
        f"{plan}/changes?limit=200",
        f"{plan}/changes?limit=200&only_changes=false",
        f"{plan}/changes?limit=200&words=model-77",
        f"{plan}/groups?by=region",
        f"{plan}/groups?by=model",
        f"{plan}/groups?by=region&against={filled.plan_in_force}",
        f"{plan}/endpoint?model=model-3&region=region-02",
        "/admin/model-summaries?limit=100",
        "/admin/model-summaries?limit=100&state=failed",
        "/admin/endpoints?limit=100",
        "/admin/endpoints?limit=100&model=model-3",
        "/admin/instances?limit=100&model=model-3",
        "/admin/events?limit=100",
        "/admin/events?limit=100&model=model-3",
        "/admin/events?limit=100&node=node-00002",
        "/admin/pools?limit=20",
        "/admin/nodes?limit=100",
        "/admin/nodes/node-00000",
        "/admin/search?words=model-77",
        "/admin/spot?limit=100",
        "/admin/status",
        "/admin/status/live",
    ]


@contextmanager
def filled_gateway(size: FleetSize) -> Iterator[GatewayProcess[Filled]]:
    """A gateway that knows a fleet of that size. This process leaves it a core for itself."""
    notes().print(f"writing {size.models} models, {size.regions} regions and {size.instances} instances")
    with work_folder() as home, gateway_process(home, partial(fill_large, size=size), core=0) as gateway:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        wait_until_read(gateway)
        yield gateway


def wait_until_read(gateway: GatewayProcess[Filled]) -> None:
    """Wait until the gateway has read its fleet."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    with client_of(gateway) as client:
        while client.get("/readyz").status_code != httpx.codes.OK:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the gateway was not ready within {_TIMEOUT_S:g} s")
            time.sleep(0.2)


def client_of(gateway: GatewayProcess[Filled]) -> httpx.Client:
    """A client that may read everything."""
    headers = {"Authorization": f"Bearer {gateway.filled.viewer_key}"}
    return httpx.Client(base_url=f"http://127.0.0.1:{gateway.port}", headers=headers, timeout=_TIMEOUT_S)


def measure(gateway: GatewayProcess[Filled], path: str, rounds: int, ask: Callable[[], int]) -> Cost:
    """What a question costs that returns the bytes of its answer; the first one is not counted."""
    ask()
    postgres = gateway.servers["postgres"]
    began = cpu_s(gateway.pid), cpu_s(postgres)
    took_s, sizes = [], []
    for _ in range(rounds):
        began_s = time.perf_counter()
        sizes.append(ask())
        took_s.append(time.perf_counter() - began_s)
    ended = cpu_s(gateway.pid), cpu_s(postgres)
    own_s, postgres_s = ((after - before) / rounds for before, after in zip(began, ended, strict=True))
    return Cost(
        path=path,
        latency_s=median(took_s),
        slowest_s=max(took_s),
        cpu_s=own_s,
        postgres_cpu_s=postgres_s,
        bytes=int(median(sizes)),
    )


def measure_endpoints(gateway: GatewayProcess[Filled], rounds: int) -> list[Cost]:
    """What each endpoint costs, and the first event of the stream."""
    with client_of(gateway) as client:

        def ask(path: str) -> int:
            answer = client.get(path)
            if answer.is_error:
                raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")
            return len(answer.content)

        def first_event() -> int:
            with client.stream("GET", "/admin/live") as stream:
                stream.raise_for_status()
                held = b""
                for chunk in stream.iter_raw():
                    held += chunk
                    if b"\n\n" in held:
                        break
            return len(held)

        costs = [measure(gateway, path, rounds, partial(ask, path)) for path in paths_of(gateway.filled)]
        return [*costs, measure(gateway, "/admin/live, first event", rounds, first_event)]


def main(
    models: Annotated[int, typer.Option(min=1)] = 1000,
    regions: Annotated[int, typer.Option(min=1)] = 60,
    instances: Annotated[int, typer.Option(min=1)] = 10_000,
    events: Annotated[int, typer.Option(min=1)] = 300_000,
    waiting: Annotated[int, typer.Option(min=0, help="Batch requests in the queue.")] = 200_000,
    rounds: Annotated[int, typer.Option(min=1, help="Calls of each endpoint, and loads of each page.")] = 7,
    pages: Annotated[bool, typer.Option(help="Measure pages, with the browser of TIDEPOOL_CHROMIUM.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure the console's endpoints and pages on a large fleet.

    \b
    Examples:
      python -m ops.bench.console.large_fleet
      python -m ops.bench.console.large_fleet --rounds 15 --no-pages --json
      TIDEPOOL_CHROMIUM=/usr/bin/chromium python -m ops.bench.console.large_fleet
    """
    size = FleetSize(models=models, regions=regions, instances=instances, events=events, waiting=waiting)
    lacking = why_no_browser() if pages else "--no-pages"
    shown: list[PageFigures] = []
    with filled_gateway(size) as gateway:
        costs = measure_endpoints(gateway, rounds)
        if lacking is None:
            shown = measure_pages(gateway, rounds)
    found: dict[str, Any] = {
        "size": asdict(size),
        "endpoints": list(map(asdict, costs)),
        "pages": list(map(asdict, shown)),
        "pages_skipped": lacking,
    }
    if as_json:
        print_json(found)
        return
    print_table(f"Endpoints: {models} models, {regions} regions, {instances} instances", _COLUMNS, found["endpoints"])
    if lacking is None:
        print_table("Pages, medians", _PAGE_COLUMNS, found["pages"])
    else:
        notes().print(f"pages were not measured: {lacking}")


if __name__ == "__main__":
    typer.run(main)
