"""What a distance between regions costs, and what the loss of the primary costs a gateway.

Three regions on one machine, each with its own Postgres; every round trip that crosses a border takes `--delays-ms`
longer. Measured at the gateway of the primary's region and at one of another region: how long it takes until a batch of
ten lines is accepted (its file, then the batch) and a key is revoked, and how many lines of a batch end in a second,
which its claims and results must keep up with. Then the primary's region is killed and nobody fails over: short
interactive requests at another region's gateway, before and while it is gone, as often as `--losses` says; in between
the region is started again.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

import httpx2 as httpx
import typer

from ops.bench.shared import work_folder
from ops.client.screen import AsJson, Columns, print_json, print_table, same
from ops.faults.load import body_of
from ops.faults.percentiles import percentile
from ops.faults.regional.stack import BorderedStack
from ops.local.replay_stack import Fleet, register_replayed, wait_replayed
from ops.local.waiting import wait_until

NOTICED_S = 8.0
ENDED_TIMEOUT_S = 300.0
AT_ONCE = 4


class DelayBench:
    """One stack, measured at one delay after the other."""

    def __init__(self, stack: BorderedStack, rounds: int, lines: int, requests: int, losses: int) -> None:
        self._stack = stack
        self._rounds, self._lines, self._requests, self._losses = rounds, lines, requests, losses
        self._near, self._far, _ = stack.regional.regions
        self._http: dict[str, httpx.AsyncClient] = {}

    async def run(self, delays_ms: list[float]) -> dict[str, Any]:
        """The rows of all delays, and the requests before and during each loss of the primary."""
        keys, urls = self._stack.regional.keys, self._stack.regional.urls()
        await asyncio.to_thread(register_replayed, urls[self._near], keys["admin"], self._stack.fleet)
        await wait_replayed(urls[self._near], keys["admin"], self._stack.fleet)
        for region in (self._near, self._far):
            self._http[region] = httpx.AsyncClient(base_url=urls[region], timeout=120, trust_env=False)
        rows = []
        for delay_ms in delays_ms:
            self._stack.heal()
            self._stack.delay(delay_ms / 1e3)
            for region, where in ((self._near, "primary's region"), (self._far, "another region")):
                rows.append({"round_trip_ms": delay_ms, "gateway": where, **await self._row(region)})
        self._stack.heal()
        interactive = []
        for number in range(self._losses):
            if number:
                await asyncio.to_thread(self._stack.regional.revive, self._near)
                await wait_replayed(urls[self._near], keys["admin"], self._stack.fleet)
                await asyncio.sleep(NOTICED_S)
            interactive.append({"loss": number + 1, "primary": "there", **await self._answers()})
            await asyncio.to_thread(self._stack.regional.kill, self._near)
            await asyncio.sleep(NOTICED_S)
            interactive.append({"loss": number + 1, "primary": "gone", **await self._answers()})
        for client in self._http.values():
            await client.aclose()
        return {"delays": rows, "interactive": interactive, "gone_to_there": ratios(interactive)}

    async def _row(self, region: str) -> dict[str, Any]:
        accepted = await self._median_ms(lambda: self._submit(region, 10))
        revoked = await self._median_ms(lambda: self._revoke(region))
        started_s = time.monotonic()
        batch_id = await self._submit(region, self._lines)

        async def has_ended() -> bool:
            batch = await self._ask("GET", region, f"/v1/batches/{batch_id}")
            return bool(batch["status"] == "completed")

        if not await wait_until(has_ended, ENDED_TIMEOUT_S):
            raise TimeoutError(f"{self._lines} lines have not ended after {ENDED_TIMEOUT_S:g} s")
        per_s = self._lines / (time.monotonic() - started_s)
        return {"batch_accepted_ms": accepted, "key_revoked_ms": revoked, "lines_per_s": round(per_s, 1)}

    async def _median_ms(self, call: Callable[[], Awaitable[object]]) -> float:
        times_s = []
        for _ in range(self._rounds):
            started_s = time.monotonic()
            await call()
            times_s.append(time.monotonic() - started_s)
        return round(statistics.median(times_s) * 1e3, 1)

    async def _submit(self, region: str, lines: int) -> str:
        content = "\n".join(
            json.dumps(
                {
                    "custom_id": f"r{n}",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": body_of(self._stack.fleet.model_names()[0], 0, 4),
                }
            )
            for n in range(lines)
        )
        files = {"file": ("in.jsonl", content.encode(), "application/jsonl")}
        file = await self._ask("POST", region, "/v1/files", files=files, data={"purpose": "batch"})
        about = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str((await self._ask("POST", region, "/v1/batches", json=about))["id"])

    async def _revoke(self, region: str) -> None:
        name = f"bench-{time.monotonic_ns()}"
        made = await self._ask("POST", region, "/admin/keys", role="admin", json={"name": name, "role": "client"})
        await self._ask("DELETE", region, f"/admin/keys/{made['id']}", role="admin")

    async def _answers(self) -> dict[str, float]:
        """Times to the whole answer of short requests at the other region's gateway."""
        times_s: list[float] = []
        left = iter(range(self._requests))
        body = body_of(self._stack.fleet.model_names()[0], 0, 2)

        async def ask() -> None:
            for _ in left:
                started_s = time.monotonic()
                await self._ask("POST", self._far, "/v1/chat/completions", json=body)
                times_s.append(time.monotonic() - started_s)

        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
        shares = (("p50_ms", 0.5), ("p99_ms", 0.99))
        found = {name: round(percentile(times_s, share) * 1e3, 1) for name, share in shares}
        return {"requests": len(times_s), **found, "load": round(os.getloadavg()[0], 1)}

    async def _ask(
        self, method: str, region: str, path: str, *, role: str = "client", **request: Any
    ) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._stack.regional.keys[role]}"}
        answer = await self._http[region].request(method, path, headers=headers, **request)
        return answer.raise_for_status().json() if answer.content else {}


def ratios(interactive: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of the times while the primary is gone to those while it is there: the median, the least and the greatest of all
    losses.
    """
    there, gone = interactive[::2], interactive[1::2]
    found = {}
    for name in ("p50_ms", "p99_ms"):
        each = [after[name] / before[name] for before, after in zip(there, gone, strict=True)]
        values = {"median": statistics.median(each), "least": min(each), "greatest": max(each)}
        found[name.removesuffix("_ms")] = {what: round(value, 3) for what, value in values.items()}
    return found


def main(
    delays_ms: Annotated[str, typer.Option(help="Round trips between regions, by commas; may be empty.")] = "0,30,80",
    rounds: Annotated[int, typer.Option(min=1, help="Submissions and revocations at each delay.")] = 10,
    lines: Annotated[int, typer.Option(min=1, help="Lines of the long batch.")] = 1000,
    requests: Annotated[int, typer.Option(min=10, help="Interactive requests before and during each loss.")] = 1000,
    losses: Annotated[int, typer.Option(min=1, help="How often the primary is lost.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure what a distance between regions costs, and what the loss of the primary costs a gateway."""
    with work_folder() as folder:
        stack = BorderedStack(folder, Fleet(regions=3, nodes=3, models=1, replay_speed=20.0))

        async def measured() -> dict[str, Any]:
            async with stack.running():
                bench = DelayBench(stack, rounds, lines, requests, losses)
                return await bench.run([float(one) for one in delays_ms.split(",") if one])

        found = asyncio.run(measured())
    if as_json:
        print_json(found)
        return
    columns: Columns = same("round_trip_ms", "gateway", "batch_accepted_ms", "key_revoked_ms", "lines_per_s")
    print_table("Distance between regions", columns, found["delays"])
    shown = same("loss", "primary", "requests", "p50_ms", "p99_ms", "load")
    print_table("Interactive requests of another region", shown, found["interactive"])
    compared = [{"of": name, **values} for name, values in found["gone_to_there"].items()]
    print_table("Gone to there", same("of", "median", "least", "greatest"), compared)


if __name__ == "__main__":
    typer.run(main)
