"""Host memory for KV: of one slot alone, or a file that other slots read."""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from dataplane.memory.kv_cache import KvShape


@dataclass(eq=False, kw_only=True)
class KvFile:
    """KV of a slot in host memory: flat uint8, cut into slabs."""

    bytes: torch.Tensor
    slab_bytes: int

    def block(self, shape: KvShape, block: int) -> torch.Tensor:
        slab, index = divmod(block, self.slab_bytes // shape.block_bytes)
        start = slab * self.slab_bytes + index * shape.block_bytes
        return self.bytes[start : start + shape.block_bytes]

    def view(self, shape: KvShape, dtype: torch.dtype) -> torch.Tensor:
        """All slabs as blocks of a shape `[slabs, blocks_per_slab, layers, 2, block_tokens, kv_heads, head_dim]`."""
        per_slab = self.slab_bytes // shape.block_bytes
        slabs = self.bytes.view(-1, self.slab_bytes)[:, : per_slab * shape.block_bytes]
        sizes = (per_slab, shape.layers, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
        return slabs.view(dtype).view(-1, *sizes)


def host_memory(size_bytes: int, file: Path | None) -> torch.Tensor:
    """Flat uint8: private, or that of a file, which is created if a size is given and else mapped as it is.

    Raises:
        OSError: the file system is full, or the file exists already or cannot be read.
        ValueError: the file is empty.
    """
    if file is None:
        return torch.empty(size_bytes, dtype=torch.uint8)
    with open(file, "r+b" if size_bytes == 0 else "x+b", opener=_no_link) as opened:
        if size_bytes:
            os.posix_fallocate(opened.fileno(), 0, size_bytes)  # a full file system must fail now
        return torch.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=torch.uint8)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
