"""The collective operations of the ranks of one slot: NCCL between GPUs, gloo between CPU processes."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LOCALHOST = "127.0.0.1"


class ProcessGroup:
    """Meets `dataplane.engines.torch.model.parallel.Collectives`. An operation that not all ranks call within the
    timeout raises RuntimeError.
    """

    def __init__(self, group: Any, ranks: int) -> None:
        self._group = group
        self._ranks = ranks

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self._ranks)]
        self._group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        """Leave the other ranks, and the file by which they met: it may be closed then."""
        self._group = None


def join_group(store: Path, rank: int, ranks: int, device: torch.device, *, timeout_s: float) -> ProcessGroup:
    """Meet the other ranks by way of a file that is empty at first. Returns when all are there. Until `close` the file
    may be opened again at any time.

    Raises:
        RuntimeError: they do not come within the timeout.
    """
    distributed: Any = dist  # which has these names, and does not say that it exports them
    meeting = distributed.FileStore(str(store), ranks)
    timeout = timedelta(seconds=timeout_s)
    meeting.set_timeout(timeout)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001  # the one way to set it
        return ProcessGroup(distributed.ProcessGroupNCCL(meeting, rank, ranks, options), ranks)
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001  # as above
    options._devices = [gloo.create_device(hostname=LOCALHOST)]  # noqa: SLF001  # else it looks this machine's name up
    options._timeout = timeout  # noqa: SLF001
    return ProcessGroup(gloo(meeting, rank, ranks, options), ranks)
