"""The other hosts of a slot whose GPUs are of several: what their followers report, and what they are told to do.

The processes of such a slot start and end together. A launch is one worker process of this agent and the ranks that
followers run for it (`dataplane.follower`): it begins when all followers report, has one model, and ends with that, or
with any of its hosts. Before a model is loaded anywhere, all hosts have its checkpoint, with the same digest.
"""

import asyncio
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataplane.checkpoints.digests import checkpoint_digest
from dataplane.checkpoints.local import in_own_thread
from dataplane.engines.core.devices import HostSpan
from dataplane.engines.vllm.version import installed_version
from dataplane.protocol.errors import BadRequestError, ModelLoadError
from dataplane.protocol.host_states import HostState
from dataplane.protocol.messages import ModelSpec
from dataplane.protocol.version import tidepool_version
from dataplane.worker.frames import Configure
from dataplane.worker.hosts import CheckOrder, HostOrders, HostReport, LaunchOrder

HOST_SILENT_MAX_S = 15.0
"""A host whose follower has said nothing for so long is lost."""
TWIN_SEEN_MAX_S = 2.0
"""A follower that reported so lately has not ended: followers report twice a second."""


@dataclass(kw_only=True)
class Host:
    """Another host of the slot. `seen_s`: when its follower reported last, or the agent began to wait for it.
    `refusal`: why its last report was refused, if it was. `boot_id`: of the follower that has its part of the present
    launch.
    """

    number: int
    seen_s: float
    report: HostReport | None = None
    refusal: str | None = None
    boot_id: str | None = None

    @property
    def name(self) -> str:
        return f"host {self.number}"


class SlotHosts:
    """The other hosts of one slot, numbered from 1."""

    def __init__(
        self,
        slot: int,
        hosts: int,
        *,
        silent_max_s: float = HOST_SILENT_MAX_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slot = slot
        self._silent_max_s = silent_max_s
        self._now_s = now_s
        self._hosts = [Host(number=number, seen_s=now_s()) for number in range(1, hosts)]
        self._address = ""
        """Of this host, as followers reach it."""
        self._check: CheckOrder | None = None
        self._checking = asyncio.Lock()
        self._digests: dict[str, str] = {}
        """On which all hosts agreed last, by the source of the checkpoint."""
        self._reported = asyncio.Event()
        self._launch: LaunchOrder | None = None

    def receive(self, report: HostReport, address: str) -> HostOrders:
        """A follower's report, which came in at `address`, and what it shall do.

        Raises:
            BadRequestError: the slot has no such host, it has other versions than this one, or another follower
                reports as it.
        """
        host = next((one for one in self._hosts if one.number == report.host), None)
        if host is None:
            raise BadRequestError(f"slot {self.slot} has {self.count} hosts: its ranks are 1 to {self.count - 1}")
        mine, theirs = (tidepool_version(), installed_version()), (report.version, report.engine_version)
        if mine != theirs:
            host.refusal = (
                f"{host.name} of slot {self.slot} has Tidepool {theirs[0]} and vLLM {theirs[1]}; the agent has"
                f" {mine[0]} and {mine[1]}"
            )
            raise BadRequestError(host.refusal)
        was_started_again = host.report is not None and host.report.boot_id != report.boot_id
        if was_started_again and self._now_s() - host.seen_s < TWIN_SEEN_MAX_S:
            raise BadRequestError(
                f"another follower reports as {host.name} of slot {self.slot}: have two got the same --rank?"
            )
        if report.host == 1:
            self._address = address
        host.report, host.refusal, host.seen_s = report, None, self._now_s()
        self._reported.set()
        has_part = host.boot_id == report.boot_id
        return HostOrders(check=self._check, launch=self._launch if has_part else None)

    @property
    def count(self) -> int:
        """Hosts of the slot, this one included."""
        return len(self._hosts) + 1

    @property
    def complete(self) -> bool:
        """Whether all followers report."""
        return all(host.report is not None and not self._is_silent(host) for host in self._hosts)

    @property
    def missing(self) -> str | None:
        """The first host whose follower does not report, as an error; None where each may still begin to."""
        for host in self._hosts:
            if self._is_silent(host):
                if host.refusal is not None:
                    return f"{host.name} of slot {self.slot} is missing: its follower was refused: {host.refusal}"
                since = "yet" if host.report is None else f"for {self._now_s() - host.seen_s:.0f} s"
                return f"{host.name} of slot {self.slot} is missing: its follower has not reported {since}"
        return None

    def waits_for(self, path: str) -> str | None:
        """What a model of this source waits for on the other hosts; None: for nothing there."""
        if absent := [host.name for host in self._hosts if host.report is None or self._is_silent(host)]:
            return f"the followers of other hosts report: {', '.join(absent)}"
        if self._check is None or self._check.path != path:
            return None
        reading = [host.name for host in self._hosts if not self._has_digest(host, self._check)]
        return f"its checkpoint is fetched and read on all hosts: {', '.join(reading) or 'this one'} not done yet"

    def states(self) -> tuple[HostState, ...]:
        """Which of the other hosts are connected."""
        return tuple(
            HostState(
                slot=self.slot,
                host=host.number,
                connected=host.report is not None and not self._is_silent(host),
                hostname=None if host.report is None else host.report.hostname,
                silent_s=None if host.report is None else round(self._now_s() - host.seen_s, 1),
                refusal=host.refusal,
            )
            for host in self._hosts
        )

    def begin(self) -> HostSpan:
        """A new launch, of the followers that report now, without a model yet."""
        for host in self._hosts:
            assert host.report is not None, "a launch begins when all hosts report"
            host.boot_id = host.report.boot_id
        self._launch = None
        return HostSpan(
            hosts=self.count,
            host=0,
            address=self._address,
            port=_free_port(self._address),
            own_address=self._address,
        )

    def launch(self, configure: Configure, model: ModelSpec) -> None:
        """Let the followers run their ranks of a model, which was checked. `model.path`: its source."""
        digest = self._digests[model.path]
        self._launch = LaunchOrder(serial=uuid.uuid4().hex, configure=configure, model=model, digest=digest)

    @property
    def has_model(self) -> bool:
        """Whether the launch has its model."""
        return self._launch is not None

    def end(self) -> None:
        """End the launch, if there is one: the followers end their ranks."""
        self._launch = None
        for host in self._hosts:
            host.boot_id = None

    @property
    def loss(self) -> str | None:
        """Why the launch cannot go on since a follower is gone; None while all are there."""
        for host in self._hosts:
            report = host.report
            if report is None or self._is_silent(host):
                return f"{host.name} was lost: its follower has not reported for {self._silent_max_s:g} s"
            if report.boot_id != host.boot_id:
                return f"{host.name} was lost: its follower was started again"
        return None

    @property
    def failure(self) -> str | None:
        """Why a follower's ranks of the launch have ended; None while none have."""
        for host in self._hosts:
            report = host.report
            if report is None:
                continue
            if self._launch is not None and report.launch == self._launch.serial and report.ended is not None:
                return f"{host.name} failed: {report.ended}"
        return None

    async def check(self, path: str, folder: Path) -> None:
        """Let all hosts have a checkpoint, which is in `folder` here, and compare their digests with this host's.

        Raises:
            ModelLoadError: names the host that cannot have it, or has another.
        """
        async with self._checking:
            check = self._check = CheckOrder(serial=uuid.uuid4().hex, path=path)
            try:
                digest = await in_own_thread(lambda: checkpoint_digest(folder, lambda: self._check is check))
                while not self._agreed(check, digest):
                    self._reported.clear()
                    await self._reported.wait()
                self._digests[path] = digest
            finally:
                self._check = None  # whoever still fetches or reads it gives that up

    def _agreed(self, check: CheckOrder, digest: str) -> bool:
        """Whether all hosts have answered, and have the digest."""
        for host in self._hosts:
            if host.report is None or host.report.check != check.serial:
                continue
            if host.report.error is not None:
                raise ModelLoadError(f"{host.name} of slot {self.slot}: {host.report.error}")
            if host.report.digest not in (None, digest):
                raise ModelLoadError(
                    f"{host.name} of slot {self.slot} has another checkpoint at {check.path}: the digest of its"
                    f" files is {host.report.digest[:12]}, here {digest[:12]}"
                )
        return all(self._has_digest(host, check) for host in self._hosts)

    def _has_digest(self, host: Host, check: CheckOrder) -> bool:
        report = host.report
        return report is not None and report.check == check.serial and report.digest is not None

    def _is_silent(self, host: Host) -> bool:
        return self._now_s() - host.seen_s > self._silent_max_s


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return int(listener.getsockname()[1])
