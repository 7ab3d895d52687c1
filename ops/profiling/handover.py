"""How soon a decode worker goes on with requests that a prefill worker begins: two worker processes, to which this one
speaks as an agent does.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace

from dataplane.agent.worker_link import WorkerLink
from dataplane.engines.core.kv import KvEvents
from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.memory.shared_events import event_file
from dataplane.protocol.tiers import IW_N
from dataplane.scheduling.schedule import TurnSettings
from dataplane.worker.frames import Add, Configure, Load, Loaded, LoadFailed, Outputs, Refused, Release, Report, Stats
from ops.profiling.checkpoints import VOCABULARY, BenchModel, DtypeName

INSTANCE = "a"
ANSWER_TOKENS = 3


class HandoverError(Exception):
    """A worker ended, or refused what it was asked."""


@dataclass(frozen=True, kw_only=True)
class Handovers:
    """What some requests that are prefilled one after another saw: the seconds from the first to the second token, the
    median and the longest; and what their copies waited for.
    """

    gap_s: float
    longest_s: float
    waited_for: dict[str, int]


@dataclass(eq=False, kw_only=True)
class Pair:
    """A prefill worker and a decode worker."""

    prefill: WorkerLink
    decode: WorkerLink
    reports: asyncio.Queue[tuple[WorkerLink, Report | None]] = field(default_factory=asyncio.Queue)
    waited_for: dict[str, int] = field(default_factory=dict)

    async def listen(self, link: WorkerLink) -> None:
        async for report in link.reports():
            self.reports.put_nowait((link, report))
        self.reports.put_nowait((link, None))

    async def receive(self) -> tuple[WorkerLink, Report]:
        """The next report.

        Raises:
            HandoverError: a worker ended, or refused something.
        """
        link, report = await self.reports.get()
        if report is None or isinstance(report, LoadFailed | Refused):
            raise HandoverError(f"a worker ended: {report}")
        if isinstance(report, Stats) and link is self.decode and report.stats.pool is not None:
            self.waited_for = report.stats.pool.kv_imports
        return link, report


def measure_handovers(
    model: BenchModel,
    folder: Path,
    *,
    devices: tuple[str, str],
    dtype: DtypeName,
    kv_events: KvEvents,
    requests: int,
    prompt_tokens: int,
    kv_token_bytes: int,
    rounds: int,
) -> Handovers:
    """Let `requests` requests at once be prefilled on the first of two devices and decoded on the other, `rounds` times
    after a warm-up. `folder`: in memory, for the KV that is handed over.

    Raises:
        HandoverError: a worker ended, or refused what it was asked.
    """
    kv_bytes = int(1.5 * requests * (prompt_tokens + 64) * kv_token_bytes) + 2**24

    kv_file = folder / "kv"

    def asked(device: str, file: Path | None) -> Configure:
        return worker_of(
            model, folder, device=device, dtype=dtype, kv_bytes=kv_bytes, kv_file=file, kv_events=kv_events
        )

    async def run() -> Handovers:
        async with _pair(asked(devices[0], kv_file), asked(devices[1], None), model) as pair:
            gaps: list[float] = []
            for number in range(rounds + 1):
                found = await _round(pair, _requests(number, requests, prompt_tokens))
                gaps += found if number else []
            while sum(pair.waited_for.values()) < (rounds + 1) * requests:
                await pair.receive()
            return Handovers(gap_s=statistics.median(gaps), longest_s=max(gaps), waited_for=pair.waited_for)

    try:
        return asyncio.run(run())
    finally:
        kv_file.unlink(missing_ok=True)
        event_file(kv_file).unlink(missing_ok=True)


def worker_of(
    model: BenchModel,
    folder: Path,
    *,
    device: str,
    dtype: DtypeName,
    kv_bytes: int,
    kv_file: Path | None,
    kv_events: KvEvents,
) -> Configure:
    """The first command of a worker that prefills where it has a `kv_file`, and else decodes."""
    return Configure(
        engine="torch",
        device=device,
        dtype=dtype,
        weights_bytes=model.weights_bytes + 2**28,
        kv_bytes=kv_bytes,
        host_kv_bytes=kv_bytes,
        host_kv_file=None if kv_file is None else str(kv_file),
        slab_bytes=None,
        cache_folder=str(folder / "models"),
        cache_bytes=2**40,
        host_wait_max_s=60.0,
        batch_max=TorchEngineSettings.batch_max,
        prefill_tokens_max=None,
        prefill_only=kv_file is not None,
        kv_events=kv_events,
        prefetch=True,
        kv_pressure="auto",
        prefix_cache=False,
        turns=TurnSettings(),
        profile=None,
        replay_speed=1.0,
        replay_mean_tokens=None,
        vllm_models_max=1,
        vllm_async_scheduling=False,
        vllm_adapters_max=0,
        vllm_adapter_rank_max=16,
        ranks=1,
        adapters_bytes=0,
    )


@asynccontextmanager
async def _pair(prefill: Configure, decode: Configure, model: BenchModel) -> AsyncIterator[Pair]:
    """Both workers with the model loaded."""
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    pair = Pair(
        prefill=await WorkerLink.start(prefill, environment), decode=await WorkerLink.start(decode, environment)
    )
    links = (pair.prefill, pair.decode)
    listening = [asyncio.create_task(pair.listen(link)) for link in links]
    try:
        for link in links:
            link.send(Load(instance_id=INSTANCE, serial=1, model=model.spec, gpus=1))
        loaded = 0
        while loaded < len(links):
            _, report = await pair.receive()
            loaded += isinstance(report, Loaded)
        yield pair
    finally:
        for link in links:
            await link.stop()
        await asyncio.gather(*listening)


def _requests(number: int, count: int, prompt_tokens: int) -> list[EngineRequest]:
    chance = random.Random(number)
    return [
        EngineRequest(
            request_id=f"{number}-{place}",
            instance_id=INSTANCE,
            tier=IW_N,
            prompt=tuple(chance.choices(range(VOCABULARY), k=prompt_tokens)),
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
        )
        for place in range(count)
    ]


async def _round(pair: Pair, asked: Sequence[EngineRequest]) -> list[float]:
    """Seconds between the first and the second token of each request, as this process sees them."""
    wanted = {one.request_id: one for one in asked}
    firsts: dict[str, tuple[float, tuple[int, ...]]] = {}
    gaps: dict[str, float] = {}
    ended = 0
    for one in asked:
        pair.prefill.send(Add(request=one))
    while ended < len(asked):
        link, report = await pair.receive()
        for output in report.outputs if isinstance(report, Outputs) else ():
            name, now_s = output.request_id, time.perf_counter()
            if output.error is not None:
                raise HandoverError(output.error)
            if link is pair.prefill:
                _prefilled(pair, wanted[name], output, firsts, now_s)
            elif name not in gaps:
                gaps[name] = now_s - firsts[name][0]
                pair.prefill.send(Release(request_id=name))
            ended += link is pair.decode and output.finish_reason is not None
    return list(gaps.values())


def _prefilled(
    pair: Pair,
    one: EngineRequest,
    output: EngineOutput,
    firsts: dict[str, tuple[float, tuple[int, ...]]],
    now_s: float,
) -> None:
    """Note a first token, and hand over its request."""
    if output.token_ids:
        firsts[one.request_id] = now_s, output.token_ids
    if output.kv is not None:
        pair.decode.send(Add(request=replace(one, generated=firsts[one.request_id][1], kv=output.kv)))


def devices_of(device: str) -> tuple[str, str]:
    """A device that prefills and another that decodes, or the same one if there is no other."""
    if torch.device(device).type == "cuda" and torch.cuda.device_count() > 1:
        return "cuda:0", "cuda:1"
    return device, device
