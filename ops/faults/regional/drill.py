"""One drill: load in every region, lose one, fail over, have it back, and count what was promised and does not hold."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from controlplane.policies.failover import MemberFacts
from ops.failover.members import ask_members, members_of
from ops.failover.run import decide, fail_over
from ops.faults.check import FINDINGS_MAX, BatchCheck, outcomes, stream_findings
from ops.faults.load import Load, Streamed
from ops.faults.percentiles import percentile
from ops.faults.regional.promises import Administrator, promise_findings
from ops.faults.regional.stack import BorderedStack
from ops.local.replay_stack import Fleet, register_replayed, wait_replayed
from ops.local.waiting import wait_until

NOTICED_AFTER_S = 2.0
STALE_PRIMARY_S = 3.0
REJOIN_TIMEOUT_S = 60.0


class Loss(StrEnum):
    """What is lost: every process of the primary's region at once; all that crosses its border; or the primary alone,
    which hangs and comes back without knowing that another has taken over.
    """

    REGION = "region"
    PARTITION = "partition"
    PRIMARY = "primary"


@dataclass(frozen=True, kw_only=True)
class RegionalPlan:
    """The parameters of a drill, for three regions. `before_s`, `lost_s` and `after_s`: how long there is load before
    the loss, while the region is lost, and after it is back.
    """

    fleet: Fleet
    loss: Loss
    before_s: float = 20.0
    lost_s: float = 30.0
    after_s: float = 20.0
    streams: int = 4
    batch_lines: int = 20
    batch_every_s: float = 4.0
    seed: int = 1


async def run_drill(plan: RegionalPlan, home: Path, notify: Callable[[str], None]) -> dict[str, Any]:
    """Run in an empty home and return the report; `broken` lists promises that do not hold."""
    stack = BorderedStack(home, plan.fleet)
    notify(f"starting {len(stack.regional.regions)} regions; the logs are in {home / 'regions'}")
    async with stack.running():
        return await _Drill(plan, stack, notify).run()


class _Drill:
    def __init__(self, plan: RegionalPlan, stack: BorderedStack, notify: Callable[[str], None]) -> None:
        self._plan = plan
        self._stack = stack
        self._notify = notify
        regional = stack.regional
        self._lost, *self._others = regional.regions
        models = plan.fleet.model_names()
        self._loads, self._administrators = {}, {}
        for number, (region, url) in enumerate(regional.urls().items()):
            self._loads[region] = Load((url,), regional.keys["client"], models, plan.seed + number)
            self._administrators[region] = Administrator(
                region, url, regional.keys["admin"], models[number % len(models)]
            )
        self._stop = asyncio.Event()
        self._lost_at_s = self._back_at_s = 0.0

    async def run(self) -> dict[str, Any]:
        """The report."""
        regional, fleet = self._stack.regional, self._plan.fleet
        url = regional.urls()[self._others[0]]
        await asyncio.to_thread(register_replayed, url, regional.keys["admin"], fleet)
        await wait_replayed(url, regional.keys["admin"], fleet)
        self._notify("every endpoint is ready; asking for the undisturbed answers")
        answers = await self._loads[self._others[0]].undisturbed()
        failed_over = await self._disturb()
        self._notify("waiting for the batches, and asking every region for what it has promised")
        batches = BatchCheck(url, regional.keys["client"], answers)
        sent = self._loads[self._others[0]].sent
        for load in self._loads.values():
            if load.sent is not sent:
                sent.batches += load.sent.batches
        await batches.run(sent)
        broken = {
            "streams": stream_findings((s for load in self._loads.values() for s in load.sent.streams), answers),
            "other regions": self._interactive_findings(),
            "batches": batches.findings,
            "changes": await promise_findings(self._promises(), regional.urls().values(), regional.keys["admin"]),
            "cut off": self._cut_off_findings(),
            "cluster": await self._cluster_findings(),
        }
        for load in self._loads.values():
            await load.close()
        return {
            "plan": asdict(self._plan),
            "broken": [f"{what}: {one}" for what, found in broken.items() for one in found[:FINDINGS_MAX]],
            "broken_count": sum(map(len, broken.values())),
            "failover": failed_over,
            "writes_back_after_s": self._writes_back_s(),
            "interactive": {region: self._interactive(load.sent.streams) for region, load in self._loads.items()},
            "batches": {"accepted": len(sent.batches), "lines": batches.lines, "lines_by_code": dict(batches.codes)},
            "batches_refused": dict(Counter(one for load in self._loads.values() for one in load.sent.uploads_failed)),
            "changes": {
                one.region: {"acknowledged": len(one.acknowledged_s), "refused": dict(one.refused)}
                for one in self._promises()
            },
            "restarts": {
                f"{region}/{name}": count
                for region, stack in regional.stacks.items()
                for name, count in stack.supervisor.restarts().items()
                if count
            },
        }

    async def _disturb(self) -> dict[str, Any]:
        """Run load in every region, lose one, and have it back."""
        plan = self._plan
        async with asyncio.TaskGroup() as group:
            for region, load in self._loads.items():
                group.create_task(load.interactive(plan.streams, self._stop))
                group.create_task(load.batches(plan.batch_lines, plan.batch_every_s, self._stop))
                group.create_task(self._administrators[region].run(self._stop))
            await asyncio.sleep(plan.before_s)
            self._notify(f"losing {self._lost}: {plan.loss}")
            self._lost_at_s = time.monotonic()
            await asyncio.to_thread(self._lose)
            await asyncio.sleep(NOTICED_AFTER_S)
            failed_over = await asyncio.to_thread(self._fail_over)
            await asyncio.sleep(plan.lost_s)
            self._notify(f"{self._lost} comes back")
            self._back_at_s = time.monotonic()
            await self._give_back()
            await asyncio.sleep(plan.after_s)
            self._stop.set()
        return failed_over

    def _lose(self) -> None:
        if self._plan.loss == Loss.REGION:
            self._stack.regional.kill(self._lost)
        elif self._plan.loss == Loss.PARTITION:
            self._stack.cut(self._lost)
        else:
            self._stack.signal_postgres(self._lost, signal.SIGSTOP)

    def _fail_over(self) -> dict[str, Any]:
        """As an operator in another region would: to the region that loses nothing."""
        url = self._stack.regional.cluster.url(self._others[0])
        region = next((one for one in self._others if not decide(url, one).losses), self._others[0])
        done = fail_over(url, region, accept_loss=False, report=self._notify)
        return {"to": region, "promoted_after_s": round(done.promoted_after_s, 3), "left": done.left}

    async def _give_back(self) -> None:
        """A former primary that still runs believes for a moment that it is one; its supervisor then starts it again,
        and it follows the new one.
        """
        if self._plan.loss == Loss.REGION:
            await asyncio.to_thread(self._stack.regional.revive, self._lost)
            return
        if self._plan.loss == Loss.PARTITION:
            self._stack.heal()
        else:
            self._stack.signal_postgres(self._lost, signal.SIGCONT)
        await asyncio.sleep(STALE_PRIMARY_S)
        self._stack.signal_postgres(self._lost, signal.SIGKILL)

    def _promises(self) -> list[Any]:
        return [one.promises for one in self._administrators.values()]

    def _writes_back_s(self) -> float | None:
        """From the loss to the first change that another region acknowledges after it; None: there was none."""
        after = [
            at_s - self._lost_at_s
            for region in self._others
            for at_s in self._administrators[region].promises.acknowledged_s
            if at_s > self._lost_at_s + NOTICED_AFTER_S
        ]
        return round(min(after), 2) if after else None

    def _interactive(self, streams: list[Streamed]) -> dict[str, Any]:
        """Outcomes, and the time to the first token before the loss and while the region is lost."""
        found: dict[str, Any] = {"outcomes": outcomes(streams)}
        for name, some in (
            ("before", [one for one in streams if one.ended_s <= self._lost_at_s]),
            ("lost", [one for one in streams if self._lost_at_s <= one.started_s <= self._back_at_s]),
        ):
            firsts = [one.first_token_s for one in some if one.first_token_s is not None]
            found[name] = {"streams": len(some)}
            if firsts:
                shares = (("p50", 0.5), ("p99", 0.99))
                found[name] |= {f"first_token_{what}_s": round(percentile(firsts, share), 3) for what, share in shares}
        return found

    def _interactive_findings(self) -> list[str]:
        """Regions that are not lost answer every request."""
        return [
            f"{region}: {stream.tier} stream of {stream.model} is {stream.outcome}: {stream.reason}"
            for region in self._others
            for stream in self._loads[region].sent.streams
            if stream.outcome != "whole"
        ]

    def _cut_off_findings(self) -> list[str]:
        """A region that is cut off with the primary acknowledges nothing."""
        if self._plan.loss != Loss.PARTITION:
            return []
        times_s = self._administrators[self._lost].promises.acknowledged_s
        within = [at_s for at_s in times_s if self._lost_at_s + 0.5 < at_s < self._back_at_s]
        return [
            f"{self._lost} acknowledged a change {at_s - self._lost_at_s:.1f} s after it was cut off" for at_s in within
        ]

    async def _cluster_findings(self) -> list[str]:
        """There is one primary, and every other server follows it on its timeline."""
        url = self._stack.regional.cluster.url(self._others[0])
        facts: list[MemberFacts] = []

        async def is_whole() -> bool:
            facts[:] = await asyncio.to_thread(ask_members, members_of(url))
            return _is_whole(facts)

        if await wait_until(is_whole, REJOIN_TIMEOUT_S):
            return []
        return [f"the servers are not one cluster after {REJOIN_TIMEOUT_S:g} s: {facts}"]


def _is_whole(facts: Iterable[MemberFacts]) -> bool:
    listed = list(facts)
    return (
        sum(one.takes_writes for one in listed) == 1
        and len({one.timeline for one in listed}) == 1
        and all(one.region is not None for one in listed)
    )
