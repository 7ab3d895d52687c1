"""One drill: load in every region, lose one, fail over, have it back, and count what was promised and does not hold."""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from controlplane.errors import InvalidValueError
from ops.failover.run import RefusedError, decide, fail_over
from ops.faults.check import outcomes
from ops.faults.load import Streamed
from ops.faults.percentiles import percentile
from ops.faults.regional.clients import ClientPlan, Clients, broken, unanswered
from ops.faults.regional.returned import Returned
from ops.faults.regional.stack import BorderedStack
from ops.local.replay_stack import Fleet, register_replayed, wait_replayed
from ops.local.waiting import wait_until

NOTICED_AFTER_S = 2.0
STALE_PRIMARY_S = 3.0
DECIDED_WITHIN_S = 120.0


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
    the loss, while the region is lost, and after it is back. `skew_s`: by how much the clocks of the second and the
    third region are ahead and behind. `patroni`: the Python of Patroni's environment, which decides who is the primary;
    None: an operator does.
    """

    fleet: Fleet
    loss: Loss
    clients: ClientPlan = field(default_factory=ClientPlan)
    before_s: float = 20.0
    lost_s: float = 30.0
    after_s: float = 20.0
    skew_s: float = 0.0
    patroni: Path | None = None


async def run_drill(plan: RegionalPlan, home: Path, notify: Callable[[str], None]) -> dict[str, Any]:
    """Run in an empty home and return the report; `broken` lists promises that do not hold."""
    stack = BorderedStack(home, plan.fleet, skew_s=plan.skew_s, patroni=plan.patroni)
    notify(f"starting {len(stack.regional.regions)} regions; the logs are in {home / 'regions'}")
    async with stack.running():
        return await _Drill(plan, stack, notify).run()


class _Drill:
    def __init__(self, plan: RegionalPlan, stack: BorderedStack, notify: Callable[[str], None]) -> None:
        self._plan = plan
        self._stack = stack
        self._notify = notify
        self._lost, *self._others = stack.regional.regions  # until it is known who is the primary
        self._clients = Clients(stack.regional, plan.fleet.model_names(), plan.clients)
        self._stop = asyncio.Event()
        self._lost_at_s = self._back_at_s = 0.0

    async def run(self) -> dict[str, Any]:
        """The report."""
        regional, fleet, clients = self._stack.regional, self._plan.fleet, self._clients
        if not await wait_until(self._is_whole, DECIDED_WITHIN_S):
            raise TimeoutError(f"there is no primary that all others follow after {DECIDED_WITHIN_S:g} s")
        self._others = [region for region in regional.regions if region != self._lost]
        url = regional.urls()[self._others[0]]
        await asyncio.to_thread(register_replayed, url, regional.keys["admin"], fleet)
        await wait_replayed(url, regional.keys["admin"], fleet)
        self._notify("every endpoint is ready; asking for the undisturbed answers")
        await clients.ask_undisturbed()
        failed_over = await self._disturb()
        self._notify("waiting for the batches, and asking every region for what it has promised")
        returned = Returned(self._stack, self._lost, self._others[0])
        found = await clients.findings(url)
        found["other regions"] = [
            one for region in self._others for one in unanswered(clients.loads[region].sent.streams, region)
        ]
        found["cut off"] = self._cut_off_findings()
        found["back"] = await returned.findings()
        await clients.close()
        return {
            "plan": asdict(self._plan) | {"patroni": self._plan.patroni is not None},
            "clocks": self._stack.clocks(),
            **broken(found),
            "failover": failed_over,
            "writes_back_after_s": self._writes_back_s(),
            "lost_region_serves_after_s": self._serves_after_s(),
            "interactive": {region: self._interactive(load.sent.streams) for region, load in clients.loads.items()},
            **clients.figures(),
        }

    async def _is_whole(self) -> bool:
        """Whether the cluster has a primary that all others follow, which is then the one to lose."""
        primary = await asyncio.to_thread(self._stack.regional.cluster.primary)
        self._lost = primary or self._lost
        return primary is not None

    async def _disturb(self) -> dict[str, Any]:
        """Run load in every region, lose one, and have it back."""
        plan = self._plan
        async with asyncio.TaskGroup() as group:
            self._clients.start(group, self._stop)
            await asyncio.sleep(plan.before_s)
            self._notify(f"losing {self._lost}: {plan.loss}")
            self._lost_at_s = time.monotonic()
            await asyncio.to_thread(self._lose)
            if plan.patroni is None:
                await asyncio.sleep(NOTICED_AFTER_S)
                failed_over = await self._fail_over_by_hand()
            else:
                failed_over = await self._wait_failed_over()
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

    async def _fail_over_by_hand(self) -> dict[str, Any]:
        """As an operator would who tries again where a server did not answer in time."""
        until_s = time.monotonic() + DECIDED_WITHIN_S
        while True:
            try:
                return await asyncio.to_thread(self._fail_over)
            except (RefusedError, InvalidValueError) as refused:
                if time.monotonic() > until_s:
                    raise
                self._notify(f"the operator tries again: {refused}")
                await asyncio.sleep(NOTICED_AFTER_S)

    def _fail_over(self) -> dict[str, Any]:
        """As an operator in another region would: to the region that loses nothing."""
        url = self._stack.regional.cluster.url(self._others[0])
        region = next((one for one in self._others if not decide(url, one).losses), self._others[0])
        done = fail_over(url, region, accept_loss=False, report=self._notify)
        return {"to": region, "promoted_after_s": round(done.promoted_after_s, 3), "left": done.left}

    async def _wait_failed_over(self) -> dict[str, Any]:
        """Until Patroni has made another region's server the primary."""
        taking: list[str] = []

        async def is_replaced() -> bool:
            facts = await asyncio.to_thread(self._stack.regional.cluster.facts)
            taking[:] = [region for region, one in facts.items() if one.takes_writes and region != self._lost]
            return bool(taking)

        if not await wait_until(is_replaced, DECIDED_WITHIN_S):
            raise TimeoutError(f"Patroni has promoted nobody after {DECIDED_WITHIN_S:g} s")
        return {"to": taking[0], "promoted_after_s": round(time.monotonic() - self._lost_at_s, 1), "by": "Patroni"}

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

    def _writes_back_s(self) -> float | None:
        """From the loss to the first change that another region acknowledges after it; None: there was none."""
        after = [
            at_s - self._lost_at_s
            for region in self._others
            for at_s in self._clients.administrators[region].promises.acknowledged_s
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

    def _serves_after_s(self) -> float | None:
        """From its return to the first whole answer of the lost region to a request that was made after it."""
        after = [
            one.ended_s - self._back_at_s
            for one in self._clients.loads[self._lost].sent.streams
            if one.started_s > self._back_at_s and one.outcome == "whole"
        ]
        return round(min(after), 2) if after else None

    def _cut_off_findings(self) -> list[str]:
        """A region that is cut off with the primary acknowledges nothing."""
        if self._plan.loss != Loss.PARTITION:
            return []
        times_s = self._clients.administrators[self._lost].promises.acknowledged_s
        within = [at_s for at_s in times_s if self._lost_at_s + 0.5 < at_s < self._back_at_s]
        return [
            f"{self._lost} acknowledged a change {at_s - self._lost_at_s:.1f} s after it was cut off" for at_s in within
        ]
