"""One fault run: start, load, inject faults, wait, check. Its report lists faults and violated guarantees."""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ops.faults.check import FINDINGS_MAX, BatchCheck, attainment, leak_findings, marked, outcomes, stream_findings
from ops.faults.injector import FaultInjector, Kind
from ops.faults.load import Load, Streamed
from ops.faults.losses import stream_losses
from ops.faults.stack import REPLICAS, SKEWS_S, FaultStack
from ops.faults.upgrade import Releases, Upgrade, schema_of, seamless_findings, unpack_release
from ops.local.replay_stack import Fleet
from ops.local.stack import Wiring
from ops.local.waiting import wait_until

PROGRESS_EVERY_S = 10.0
GONE_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of a run. `calm_s`: how long interactive load continues after the last fault. `upgrade`: no
    faults; every process of the previous release is replaced by this one's, and back.
    """

    fleet: Fleet
    minutes: float
    every_s: float
    seed: int
    gateways: int = 2
    kinds: tuple[Kind, ...] = tuple(Kind)
    streams: int = 8
    batch_lines: int = 40
    batch_every_s: float = 15.0
    calm_s: float = 30.0
    upgrade: bool = False


async def run_faults(plan: Plan, home: Path, notify: Callable[[str], None]) -> dict[str, Any]:
    """Run in an empty home and return the report; `broken` lists violated guarantees."""
    stack, injector = _make(plan, home, notify)
    notify(f"starting {plan.fleet.nodes} nodes and {len(stack.links)} links; the logs are in {home / 'logs'}")
    async with stack.running():
        report = await _Run(plan, stack, injector, notify).run()
    report["broken"] += await _left_behind(home)
    return report


def _make(plan: Plan, home: Path, notify: Callable[[str], None]) -> tuple[FaultStack, FaultInjector | Upgrade]:
    """The stack, and what disturbs it."""
    if not plan.upgrade:
        stack = FaultStack(home, plan.fleet, gateways=plan.gateways)
        return stack, FaultInjector(stack, plan.kinds, plan.seed)
    previous = unpack_release(home / "previous")
    counts = Wiring(replicas={**REPLICAS, "api": plan.gateways})
    names = [name for command in ("api", "dispatcher", "worker", "beat") for name in counts.names(command)]
    names += [f"agent-{node.name}" for node in plan.fleet.local_nodes()]
    releases = Releases(home / "releases", names, previous)
    stack = FaultStack(
        home, plan.fleet, gateways=plan.gateways, programs=releases.programs(), schema=schema_of(previous)
    )
    return stack, Upgrade(stack, releases, previous, notify)


class _Run:
    def __init__(
        self, plan: Plan, stack: FaultStack, injector: FaultInjector | Upgrade, notify: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._stack = stack
        self._notify = notify
        local = stack.local
        self._load = Load(local.urls, local.keys["client"], plan.fleet.model_names(), plan.seed)
        self._injector = injector
        self._stop_faults, self._stop_batches, self._stop_streams = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self) -> dict[str, Any]:
        await self._stack.register()
        await self._stack.wait_ready()
        self._notify("every endpoint is ready; asking for the undisturbed answers")
        answers = await self._load.undisturbed()
        calm_from_s = await self._disturb()
        sent = self._load.sent
        self._notify("waiting for the batches")
        batches = BatchCheck(self._stack.local.url, self._stack.local.keys["client"], answers)
        await batches.run(sent)
        leaks, held = await leak_findings(self._stack)
        await self._load.close()
        broken = {
            "streams": stream_findings(sent.streams, answers),
            "batches": batches.findings,
            "leaks": leaks,
        }
        if self._plan.upgrade:
            broken["upgrade"] = seamless_findings(sent.streams, sent.uploads_failed)
        return {
            "plan": asdict(self._plan),
            "clocks_wrong_s": {} if self._plan.upgrade else SKEWS_S,
            "broken": [f"{what}: {one}" for what, found in broken.items() for one in found[:FINDINGS_MAX]],
            "broken_count": sum(map(len, broken.values())),
            "interactive": self._interactive([s for s in sent.streams if s.started_s < calm_from_s]),
            "losses": stream_losses(sent.streams, self._injector.times()),
            "interactive_after": self._interactive([s for s in sent.streams if s.started_s >= calm_from_s]),
            "batches": {
                "accepted": len(sent.batches),
                "uploads_failed": sent.uploads_failed,
                "lines": batches.lines,
                "lines_by_code": dict(batches.codes),
            },
            "held_at_the_end": held,
            "restarts": {name: n for name, n in self._stack.local.supervisor.restarts().items() if n},
            "faults": dict(Counter(str(made.kind) for made in self._injector.made)),
            "faults_made": self._injector.as_json(),
        }

    async def _disturb(self) -> float:
        """Run load with faults, then load alone. Returns the time of the last fault's end, on `time.monotonic`."""
        plan = self._plan
        async with asyncio.TaskGroup() as group:
            group.create_task(self._load.interactive(plan.streams, self._stop_streams))
            group.create_task(self._load.batches(plan.batch_lines, plan.batch_every_s, self._stop_batches))
            injecting = group.create_task(self._injector.run(plan.every_s, self._stop_faults))
            progress = group.create_task(self._report_progress())
            await asyncio.sleep(plan.minutes * 60)
            self._stop_faults.set()
            await injecting
            self._stop_batches.set()
            self._notify("no more faults; calm")
            await asyncio.to_thread(self._stack.local.supervisor.wait_ready, 180.0)
            calm_from_s = time.monotonic()
            await asyncio.sleep(plan.calm_s)
            self._stop_streams.set()
            progress.cancel()
        return calm_from_s

    async def _report_progress(self) -> None:
        started_s = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            sent, made = self._load.sent, self._injector.made
            last = f"; last: {made[-1].kind} {made[-1].victim}" if made else ""
            self._notify(
                f"{time.monotonic() - started_s:4.0f} s: {len(made)} faults{last}; "
                f"{len(sent.streams)} streams {outcomes(sent.streams)}; {len(sent.batches)} batches"
            )

    def _interactive(self, streams: list[Streamed]) -> dict[str, Any]:
        return {
            "streams": len(streams),
            "retried": sum(stream.attempts > 1 for stream in streams),
            "outcomes": outcomes(streams),
            "attainment": [asdict(one) for one in attainment(streams)],
        }


async def _left_behind(home: Path) -> list[str]:
    """Findings for processes that outlived the run."""

    async def are_gone() -> bool:
        return not marked(home)

    await wait_until(are_gone, GONE_TIMEOUT_S)
    return [f"leaks: process {pid} outlived its stack" for pid in marked(home)]


def print_progress(line: str) -> None:
    """One line on standard error."""
    print(f"faults: {line}", file=sys.stderr, flush=True)


def report_text(report: dict[str, Any]) -> str:
    """The report as text: the figures, and every violated guarantee."""
    shown = {name: value for name, value in report.items() if name not in {"faults_made", "broken", "plan"}}
    lines = [f"{name}: {json.dumps(value)}" for name, value in shown.items()]
    broken = report["broken"] or ["none"]
    return "\n".join([*lines, "violated guarantees:", *(f"  {one}" for one in broken)])
