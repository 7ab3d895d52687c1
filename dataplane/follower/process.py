"""The follower process, on each host but the first of a slot whose GPUs are of several: it does what the agent asks.

It asks the agent (the head) twice a second, has checkpoints that the agent names, and runs this host's ranks of a model
in a process of its own (`dataplane.worker.ranks`), for as long as the agent wants them. It opens no port; vLLM's ranks
do, among the hosts of the slot. While the head cannot be reached the ranks go on, for `HOST_SILENT_MAX_S`.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
import uuid
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import msgspec
import structlog
import uvloop

from dataplane.agent.host_settings import HostSettings
from dataplane.agent.slot_hosts import HOST_SILENT_MAX_S
from dataplane.agent.worker_link import WorkerLink
from dataplane.agent.workers import StartWorker
from dataplane.checkpoints.digests import checkpoint_digest
from dataplane.checkpoints.local import ProgressLog, in_own_thread, local_checkpoint
from dataplane.engines.core.devices import VISIBLE, visible_gpus
from dataplane.engines.vllm.version import installed_version
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import Failed
from dataplane.protocol.tls import client_context
from dataplane.protocol.version import tidepool_version
from dataplane.worker.frames import FrameError, Load, Loaded, LoadFailed
from dataplane.worker.hosts import CheckOrder, HostOrders, HostReport, LaunchOrder

log = structlog.get_logger()

ASK_EVERY_S = 0.5
ANSWER_MAX_S = 5.0
_orders_decoder: msgspec.json.Decoder[HostOrders] = msgspec.json.Decoder(HostOrders)
_failed_decoder: msgspec.json.Decoder[Failed] = msgspec.json.Decoder(Failed)


class HeadRefusesError(Exception):
    """The head refuses this follower. The message is its own."""


def run_follower(settings: HostSettings, *, head: str, slot: int, rank: int) -> None:
    """Run a host's follower until SIGTERM or SIGINT; then end its ranks."""
    uvloop.run(_follow(Follower(settings, head=head, slot=slot, rank=rank)))


async def _follow(follower: "Follower") -> None:
    following = asyncio.create_task(follower.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, following.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await following


class Follower:
    """One host's follower. `head`: the URL of the agent; `slot`: its slot that this host is of; `rank`: this host's
    number in it, from 1. `start_ranks` starts the process that runs the ranks.
    """

    def __init__(
        self, settings: HostSettings, *, head: str, slot: int, rank: int, start_ranks: StartWorker | None = None
    ) -> None:
        self._settings = settings
        self._head = head
        self._report = HostReport(
            slot=slot,
            host=rank,
            hostname=socket.gethostname(),
            boot_id=uuid.uuid4().hex,
            version=tidepool_version(),
            engine_version=installed_version(),
        )
        self._start_link = start_ranks or partial(WorkerLink.start, module="dataplane.worker.ranks")
        self._changed = asyncio.Event()
        self._folders: dict[tuple[str, str], Path] = {}
        """Of the checkpoints that were asked for, by source and digest."""
        self._check: asyncio.Task[None] | None = None
        self._link: WorkerLink | None = None
        self._ranks: asyncio.Task[None] | None = None
        self._problem: str | None = None

    async def run(self) -> None:
        """Follow the head until cancelled; then end the ranks."""
        async with httpx.AsyncClient(
            base_url=self._head,
            headers={"authorization": f"Bearer {self._settings.node_key.get_secret_value()}"},
            timeout=ANSWER_MAX_S,
            trust_env=False,
            verify=client_context(self._settings.tls_ca_file),
        ) as client:
            heard_s = time.monotonic()
            try:
                while True:
                    self._changed.clear()
                    try:
                        orders = await self._ask(client)
                    except (httpx.HTTPError, HeadRefusesError, msgspec.DecodeError) as error:
                        self._note(str(error) or type(error).__name__)
                        if time.monotonic() - heard_s > HOST_SILENT_MAX_S:
                            await self._end_ranks()  # the head gives up the launch too
                    else:
                        self._note(None)
                        heard_s = time.monotonic()
                        await self._obey(orders)
                    await self._pause()
            finally:
                if self._check is not None:
                    self._check.cancel()
                await self._end_ranks()

    async def _ask(self, client: httpx.AsyncClient) -> HostOrders:
        response = await client.post("/hosts", content=msgspec.json.encode(self._report))
        if response.is_success:
            return _orders_decoder.decode(response.content)
        raise HeadRefusesError(_failed_decoder.decode(response.content).message)

    async def _pause(self) -> None:
        """Until the next report is due: at once where something has changed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_EVERY_S):
                await self._changed.wait()

    async def _obey(self, orders: HostOrders) -> None:
        asked = None if orders.check is None else orders.check.serial
        if asked != self._report.check:
            if self._check is not None:
                self._check.cancel()
            self._tell(check=asked, digest=None, error=None)
            if orders.check is not None:
                self._check = asyncio.create_task(self._have(orders.check))
        wanted = None if orders.launch is None else orders.launch.serial
        if wanted != self._report.launch:
            await self._end_ranks()
            self._tell(launch=wanted, ended=None)
            if orders.launch is not None:
                await self._start_ranks(orders.launch)

    async def _have(self, check: CheckOrder) -> None:
        """Have a checkpoint on this host, and tell its digest or why it cannot be had. One that the head asks for no
        more is not fetched or read to its end.
        """

        def is_wanted() -> bool:
            return self._report.check == check.serial

        def fetch() -> tuple[Path, str]:
            folder = local_checkpoint(check.path, self._settings.sources, ProgressLog(check.path, is_wanted))
            return folder, checkpoint_digest(folder, is_wanted)

        try:
            folder, digest = await in_own_thread(fetch)
        except ModelLoadError as error:
            self._tell(error=error.message)
        except Exception as error:  # nobody awaits this task
            self._tell(error=f"{type(error).__name__}: {error}")
        else:
            self._folders[check.path, digest] = folder
            self._tell(digest=digest)

    async def _start_ranks(self, launch: LaunchOrder) -> None:
        span = launch.configure.span
        assert span is not None, "only slots of several hosts have followers"
        folder = self._folders.get((launch.model.path, launch.digest))
        if folder is None:
            self._tell(ended=f"it has no checkpoint at {launch.model.path} with the digest {launch.digest[:12]}")
            return
        try:
            span = msgspec.structs.replace(span, host=self._report.host, own_address=self._own_address())
            device = "cpu" if self._settings.device == "cpu" else "cuda:0"
            configure = msgspec.structs.replace(launch.configure, device=device, span=span)
            environment = self._environment(configure.ranks // span.hosts)
            link = self._link = await self._start_link(configure, environment)
        except (OSError, ModelLoadError) as error:
            self._tell(ended=f"its ranks cannot be started: {error}")
            return
        log.info("ranks started", model=launch.model.name, pid=link.pid)
        model = msgspec.structs.replace(launch.model, path=str(folder), adapters=())
        link.send(Load(instance_id="", serial=0, model=model, gpus=configure.ranks))
        self._ranks = asyncio.create_task(self._watch(link))

    async def _watch(self, link: WorkerLink) -> None:
        """Tell the end of the ranks."""
        error = None
        try:
            async for report in link.reports():
                if isinstance(report, Loaded):
                    log.info("ranks loaded", pid=link.pid)
                elif isinstance(report, LoadFailed):
                    error = report.error
        except FrameError as fault:
            error = f"the process of its ranks was ended: {fault}"
        status = await link.stop()
        error = error or f"the process of its ranks ended with status {status}"
        log.info("ranks ended", pid=link.pid, end=error)
        self._tell(ended=error)

    async def _end_ranks(self) -> None:
        """End the ranks, if there are any, and wait until that is in the report. Where this wait is cancelled, their
        process is still waited for.
        """
        if self._link is not None and self._ranks is not None:
            self._link.hang_up()
            await asyncio.shield(self._ranks)
        self._link = self._ranks = None

    def _environment(self, gpus: int) -> dict[str, str]:
        """Of the process of the ranks, which sees its GPUs alone."""
        given = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        kind, _, first = self._settings.device.partition(":")
        if kind == "cuda":
            start = int(first or 0)
            given[VISIBLE] = visible_gpus(range(start, start + gpus), os.environ)
        return given

    def _own_address(self) -> str:
        """The address of this host in the network of the head. Nothing is sent.

        Raises:
            OSError: the head's name has no address.
        """
        url = urlsplit(self._head)
        family, kind, protocol, _, address = socket.getaddrinfo(url.hostname, url.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])

    def _tell(self, **changes: object) -> None:
        """Change the next report."""
        self._report = msgspec.structs.replace(self._report, **changes)
        self._changed.set()

    def _note(self, problem: str | None) -> None:
        """Log a problem with the head when it begins, changes or ends."""
        if problem == self._problem:
            return
        if problem is None:
            log.info("following", head=self._head, slot=self._report.slot, rank=self._report.host)
        else:
            log.warning("cannot follow the head", head=self._head, error=problem)
        self._problem = problem
