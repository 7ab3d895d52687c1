"""The clients of a drill: in each region load, an administrator and a planner; and what they were promised."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ops.faults.check import FINDINGS_MAX, BatchCheck, stream_findings
from ops.faults.load import Load, Streamed
from ops.faults.regional.planners import Planner, ask_plan_findings
from ops.faults.regional.promises import Administrator, promise_findings
from ops.local.regional_stack import RegionalStack


@dataclass(frozen=True, kw_only=True)
class ClientPlan:
    """How much they ask for, in each region."""

    streams: int = 4
    batch_lines: int = 20
    batch_every_s: float = 4.0
    seed: int = 1


class Clients:
    """Of every region of a stack."""

    def __init__(self, stack: RegionalStack, models: Sequence[str], plan: ClientPlan) -> None:
        self._stack = stack
        self._plan = plan
        self._answers: Mapping[tuple[str, int], Mapping[str, str]] = {}
        self._batches: BatchCheck | None = None
        self.loads: dict[str, Load] = {}
        self.administrators: dict[str, Administrator] = {}
        self.planners: dict[str, Planner] = {}
        for number, (region, url) in enumerate(stack.urls().items()):
            admin = stack.keys["admin"]
            self.loads[region] = Load((url,), stack.keys["client"], models, plan.seed + number)
            self.administrators[region] = Administrator(region, url, admin, models[number % len(models)])
            self.planners[region] = Planner(region, url, admin)

    async def ask_undisturbed(self) -> None:
        """Remember the answer to every prompt, before anything is disturbed."""
        self._answers = await next(iter(self.loads.values())).undisturbed()

    def start(self, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        """Ask in every region until the event."""
        for region, load in self.loads.items():
            group.create_task(load.interactive(self._plan.streams, stop))
            group.create_task(load.batches(self._plan.batch_lines, self._plan.batch_every_s, stop))
            group.create_task(self.administrators[region].run(stop))
            group.create_task(self.planners[region].run(stop))

    async def findings(self, url: str) -> dict[str, list[str]]:
        """What does not hold of what they were promised. Waits at the gateway at `url` until all batches have ended."""
        admin = self._stack.keys["admin"]
        sent, *others = (load.sent for load in self.loads.values())
        for other in others:
            sent.batches += other.batches
        self._batches = BatchCheck(url, self._stack.keys["client"], self._answers)
        await self._batches.run(sent)
        kept = [one.promises for one in self.administrators.values()]
        planned = [one.promises for one in self.planners.values()]
        return {
            "streams": stream_findings((s for load in self.loads.values() for s in load.sent.streams), self._answers),
            "batches": self._batches.findings,
            "changes": await promise_findings(kept, self._stack.urls().values(), admin),
            "plans": await asyncio.to_thread(ask_plan_findings, planned, url, admin),
        }

    def figures(self) -> dict[str, Any]:
        """What they asked for, and what became of it."""
        assert self._batches is not None, "the findings come first"
        loads = self.loads.values()
        changes = {region: one.promises for region, one in self.administrators.items()}
        plans = {region: one.promises for region, one in self.planners.items()}
        return {
            "batches": {
                "accepted": len(next(iter(loads)).sent.batches),
                "lines": self._batches.lines,
                "lines_by_code": dict(self._batches.codes),
            },
            "batches_refused": dict(Counter(one for load in loads for one in load.sent.uploads_failed)),
            "changes": {
                region: {"acknowledged": len(one.acknowledged_s), "refused": dict(one.refused)}
                for region, one in changes.items()
            },
            "plans": {
                region: {"applied": len(one.applied), "refused": dict(one.refused)} for region, one in plans.items()
            },
            "restarts": {
                f"{region}/{name}": count
                for region, stack in self._stack.stacks.items()
                for name, count in stack.supervisor.restarts().items()
                if count
            },
        }

    async def close(self) -> None:
        """Close the loads' connections."""
        for load in self.loads.values():
            await load.close()


def unanswered(streams: Sequence[Streamed], region: str) -> list[str]:
    """Requests of a region that serves all the time, and did not answer one."""
    return [
        f"{region}: {stream.tier} stream of {stream.model} is {stream.outcome}: {stream.reason}"
        for stream in streams
        if stream.outcome != "whole"
    ]


def broken(found: Mapping[str, list[str]]) -> dict[str, Any]:
    """What does not hold, for a report."""
    return {
        "broken": [f"{what}: {one}" for what, each in found.items() for one in each[:FINDINGS_MAX]],
        "broken_count": sum(map(len, found.values())),
    }
