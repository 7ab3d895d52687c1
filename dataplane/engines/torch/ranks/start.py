"""The start of a slot of several ranks by the process of rank 0."""

import os
from contextlib import ExitStack
from pathlib import Path

import torch

from dataplane.engines.torch.model.parallel import Rank
from dataplane.engines.torch.ranks.collectives import join_group
from dataplane.engines.torch.ranks.commands import ARENA, VERSION, Setup, send_command
from dataplane.engines.torch.ranks.leader import Leader
from dataplane.engines.torch.ranks.processes import OtherRanks
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.errors import DeviceLostError

START_MAX_S = 300.0
"""How long the other ranks may take until they read commands: they import torch and the model classes first."""


def lead(settings: TorchEngineSettings, arena: torch.Tensor, others: OtherRanks) -> Leader:
    """Meet the other ranks of a slot. `arena`: that of rank 0.

    Raises:
        DeviceLostError: one does not come.
    """
    with ExitStack() as undo:
        for connection in others.connections:
            undo.enter_context(connection)
        store = Path(f"/proc/self/fd/{others.meeting}")
        try:
            for number, connection in enumerate(others.connections, start=1):
                connection.settimeout(START_MAX_S)
                send_command(connection, _setup(settings, number, arena.nbytes, store))
            for connection in others.connections:
                if not connection.recv(1):
                    raise DeviceLostError("a rank ended at its start")
                connection.settimeout(settings.ranks_timeout_s)
            group = join_group(store, 0, settings.ranks, arena.device, timeout_s=settings.ranks_timeout_s)
        except (OSError, RuntimeError) as error:
            raise DeviceLostError(f"the {settings.ranks} ranks of the slot do not meet: {error}") from error
        undo.pop_all()

    def end() -> None:
        try:
            others.end()
        finally:
            group.close()
            os.close(others.meeting)

    rank = Rank(index=0, count=settings.ranks, collectives=group)
    leader = Leader(rank, others.connections, end, exports=settings.host_kv_file is not None)
    leader.regions.add(ARENA, arena)
    return leader


def _setup(settings: TorchEngineSettings, rank: int, arena_bytes: int, store: Path) -> Setup:
    kind, _, first = settings.device.partition(":")
    return Setup(
        version=VERSION,
        rank=rank,
        ranks=settings.ranks,
        device=f"cuda:{int(first or 0) + rank}" if kind == "cuda" else settings.device,
        dtype=settings.dtype,
        arena_bytes=arena_bytes,
        slab_bytes=settings.slab_size_bytes,
        host_kv_bytes=settings.host_kv_bytes // settings.slab_size_bytes * settings.slab_size_bytes,
        host_kv_file=None if settings.host_kv_file is None else str(settings.host_kv_file),
        block_tokens=settings.block_tokens,
        copy_threads=settings.copy_threads,
        store=str(store),
        timeout_s=settings.ranks_timeout_s,
    )
