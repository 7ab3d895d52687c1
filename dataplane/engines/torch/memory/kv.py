"""KV of a slot: blocks in the arena, blocks in host memory, and the transfers between them.

Three rules (Aegaeon 5.3), each enforced at one point. A step reads a sequence's KV only when it is on the DEVICE: KV
that is being transferred has an event that must pass first (`settle`). The next transfer of a sequence begins when its
last one has passed. Blocks that a transfer reads or writes are not allocated again until its event has passed.
"""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dataplane.engines.core.kv import KvLocation
from dataplane.engines.interface import KvHandle
from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.copies.open import pinned, record_event
from dataplane.engines.torch.memory.kv_file import KvFile, host_memory
from dataplane.engines.torch.memory.transfer_rates import TransferRates
from dataplane.memory.events import PASSED, Event
from dataplane.memory.kv_cache import HostSlabs, KvCache, KvShape, OutOfBlocksError, blocks_for
from dataplane.memory.slabs import SlabArena

TRIES_MAX = 5
"""How often in a row a transfer of a sequence's KV may fail before it is dropped and recomputed."""

POLL_S = 0.0002


@dataclass(eq=False, kw_only=True)
class SequenceKv:
    """The KV of one sequence. `blocks` in the arena, `host` in host memory, or in `file` of another slot."""

    shape: KvShape
    location: KvLocation = KvLocation.NONE
    blocks: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    file: KvFile | None = None
    event: Event = PASSED
    sent_s: float = 0.0
    tries: int = 0

    @property
    def size_bytes(self) -> int:
        """Its memory, on the side where it takes more."""
        return max(len(self.blocks), len(self.host)) * self.shape.block_bytes


class KvStore:
    """The KV of one slot, over the arena's bytes. Meets `dataplane.engines.core.kv.KvMemory` and, in
    `dataplane.engines.core.pressure_handler`, `KvCapacity`. Called by one thread.
    """

    def __init__(
        self,
        arena: SlabArena,
        buffer: torch.Tensor,
        slab_bytes: int,
        *,
        host_bytes: int,
        host_file: Path | None,
        make_stream: Callable[[str], CopyStream],
        rates: TransferRates,
    ) -> None:
        self._device = KvFile(bytes=buffer, slab_bytes=slab_bytes)
        self._arena = arena
        self.device_cache = KvCache(arena, slab_bytes)
        self._host_slabs = HostSlabs(host_bytes // slab_bytes)
        self.host_cache = KvCache(self._host_slabs, slab_bytes)
        self._host_file = host_file
        memory = host_memory(self._host_slabs.slabs * slab_bytes, host_file)
        self._host = KvFile(bytes=pinned(memory, buffer.device), slab_bytes=slab_bytes)
        self._in, self._out = make_stream("kv_in"), make_stream("kv_out")
        self.rates = rates
        self._views: dict[tuple[KvShape, torch.dtype], torch.Tensor] = {}
        self._files: dict[str, KvFile] = {}
        self._moving: list[SequenceKv] = []
        self.swapped_out_total = 0
        self.swapped_in_total = 0

    @property
    def slab_bytes(self) -> int:
        return self._device.slab_bytes

    @property
    def moving(self) -> bool:
        return bool(self._moving)

    @property
    def freeing(self) -> bool:
        """Also while a transfer still reads offloaded layers, whose slabs KV gets then."""
        return self._arena.lent_in_transfer or any(kv.location is KvLocation.SWAPPING_OUT for kv in self._moving)

    @property
    def swap_out_wait_s(self) -> float:
        leaving_bytes = sum(kv.size_bytes for kv in self._moving if kv.location is KvLocation.SWAPPING_OUT)
        return leaving_bytes / self.rates.kv_out.bytes_per_s

    def link_bytes_per_s(self, kv: SequenceKv) -> tuple[float, float]:
        return self.rates.kv_out.bytes_per_s, self.rates.kv_in.bytes_per_s

    def fits(self, kv: SequenceKv, *, spare: int) -> bool:
        return self.free_blocks(kv.shape) >= len(kv.host) + spare

    def free_blocks(self, shape: KvShape) -> int:
        """Blocks of this shape that could be allocated now."""
        return self.device_cache.free_blocks(shape) + self._arena.free_kv_slabs * self.device_cache.blocks_per_slab(
            shape
        )

    def missing_bytes(self, kv: SequenceKv, tokens: int) -> int:
        """See `KvCapacity`; in whole slabs."""
        wanted = len(kv.host) if kv.location is KvLocation.HOST else blocks_for(tokens, kv.shape.block_tokens)
        missing_blocks = wanted - len(kv.blocks) - self.device_cache.free_blocks(kv.shape)
        missing_slabs = -(-missing_blocks // self.device_cache.blocks_per_slab(kv.shape)) - self._arena.free_kv_slabs
        return max(missing_slabs, 0) * self._device.slab_bytes

    def host_fits(self, kv: SequenceKv, tokens: int) -> bool:
        free_blocks = self._host_slabs.free_slabs * self.host_cache.blocks_per_slab(kv.shape)
        return blocks_for(tokens, kv.shape.block_tokens) <= free_blocks + self.host_cache.free_blocks(kv.shape)

    def lies_in(self, kv: SequenceKv, slabs: Container[int]) -> bool:
        """Whether one of its blocks is in one of these slabs of the arena."""
        per_slab = self.device_cache.blocks_per_slab(kv.shape)
        return any(block // per_slab in slabs for block in kv.blocks)

    def view(self, shape: KvShape, dtype: torch.dtype) -> torch.Tensor:
        """The arena as blocks of a shape `[slabs, blocks_per_slab, layers, 2, block_tokens, kv_heads, head_dim]`."""
        if (shape, dtype) not in self._views:
            slab_bytes, per_slab = self._device.slab_bytes, self.device_cache.blocks_per_slab(shape)
            slabs = self._device.bytes.view(-1, slab_bytes)[:, : per_slab * shape.block_bytes]
            sizes = (per_slab, shape.layers, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
            self._views[shape, dtype] = slabs.view(dtype).view(self._arena.slabs, *sizes)
        return self._views[shape, dtype]

    def capacity_blocks(self, shape: KvShape) -> int:
        """Blocks of this shape that fit in the KV region."""
        return (self._arena.slabs - self._arena.weights_slabs) * self.device_cache.blocks_per_slab(shape)

    def capacity_tokens(self, shape: KvShape) -> int:
        """Tokens whose KV one request alone can have: in the arena and, if it is to be exported, in host memory."""
        tokens = self.capacity_blocks(shape) * shape.block_tokens
        if self._host_file is None:
            return tokens
        return min(tokens, self._host_slabs.slabs * self.host_cache.blocks_per_slab(shape) * shape.block_tokens)

    def check_fits(self, shape: KvShape) -> None:
        """Check that KV of this shape fits in the arena.

        Raises:
            ValueError: a block exceeds a slab, or there is no slab for KV.
        """
        if self.capacity_blocks(shape) == 0:
            raise ValueError(f"kv_bytes is less than a slab of {self._device.slab_bytes} bytes")

    def check(self, held: Sequence[SequenceKv]) -> None:
        """Assert that the blocks in use are those of `held`, each once."""
        self.device_cache.check()
        self.host_cache.check()
        for cache, blocks in ((self.device_cache, "blocks"), (self.host_cache, "host")):
            used_bytes = sum(usage.used_bytes - usage.moving_bytes for usage in cache.usage().values())
            mine = [kv for kv in held if blocks == "blocks" or kv.file is None]
            known_bytes = sum(len(getattr(kv, blocks)) * kv.shape.block_bytes for kv in mine)
            assert used_bytes == known_bytes, f"{used_bytes} bytes of {blocks} are in use, {known_bytes} are known of"

    def grow(self, kv: SequenceKv, tokens: int) -> bool:
        missing = blocks_for(tokens, kv.shape.block_tokens) - len(kv.blocks)
        if missing > 0:
            try:
                kv.blocks += self.device_cache.allocate(kv.shape, missing)
            except OutOfBlocksError:
                return False
        kv.location = KvLocation.DEVICE
        return True

    def swap_out(self, kv: SequenceKv, tokens: int) -> bool:
        assert kv.location is KvLocation.DEVICE
        needed = blocks_for(tokens, kv.shape.block_tokens)
        try:
            kv.host = self.host_cache.allocate(kv.shape, needed)
        except OutOfBlocksError:
            return False
        self.device_cache.free(kv.shape, kv.blocks[needed:])
        kv.blocks = kv.blocks[:needed]
        kv.location, kv.tries = KvLocation.SWAPPING_OUT, 0
        self._send(kv)
        return True

    def swap_in(self, kv: SequenceKv) -> bool:
        assert kv.location is KvLocation.HOST
        try:
            kv.blocks = self.device_cache.allocate(kv.shape, len(kv.host))
        except OutOfBlocksError:
            return False
        kv.location, kv.tries = KvLocation.SWAPPING_IN, 0
        self._send(kv)
        return True

    def settle(self) -> None:
        """Complete the transfers that have ended: free their source, or repeat them if they failed."""
        self._arena.settle()
        self.device_cache.settle()
        self.host_cache.settle()
        for kv in [kv for kv in self._moving if kv.event.done()]:
            self._moving.remove(kv)
            if kv.event.error is None:
                self._moved(kv)
            elif kv.tries < TRIES_MAX:
                kv.tries += 1
                self._send(kv)
            else:
                self.drop(kv)

    def await_one(self) -> None:
        """Wait until the oldest transfer has ended, if one is under way."""
        while self._moving and not self._moving[0].event.done():
            time.sleep(POLL_S)

    def drop(self, kv: SequenceKv) -> None:
        """See `KvMemory`; blocks of a transfer are freed when it has ended."""
        if kv in self._moving:
            self._moving.remove(kv)
        if kv.blocks:
            self.device_cache.free(kv.shape, kv.blocks, after=kv.event)
        if kv.host and kv.file is None:
            self.host_cache.free(kv.shape, kv.host, after=kv.event)
        kv.blocks, kv.host, kv.file = [], [], None
        kv.location, kv.event = KvLocation.NONE, PASSED

    def handle(self, kv: SequenceKv, tokens: int) -> KvHandle:
        assert kv.location is KvLocation.HOST
        assert self._host_file is not None, "the settings require a file where KV is exported"
        shape = kv.shape
        return KvHandle(
            file=str(self._host_file),
            slab_bytes=self._host.slab_bytes,
            shape=(shape.layers, shape.kv_heads, shape.head_dim, shape.block_tokens, shape.itemsize),
            blocks=tuple(kv.host),
            tokens=tokens,
        )

    def adopt(self, kv: SequenceKv, handle: KvHandle) -> bool:
        """See `KvMemory`; also False if it has another shape."""
        file = self._open(handle)
        slabs = 0 if file is None else file.bytes.numel() // file.slab_bytes
        layers, kv_heads, head_dim, block_tokens, itemsize = handle.shape
        shape = KvShape(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens, itemsize=itemsize
        )
        if file is None or shape != kv.shape:
            return False
        if not all(0 <= block < slabs * (file.slab_bytes // shape.block_bytes) for block in handle.blocks):
            return False
        kv.file, kv.host, kv.location = file, list(handle.blocks), KvLocation.HOST
        return True

    def _send(self, kv: SequenceKv) -> None:
        file = kv.file or self._host
        pairs = [
            (self._device.block(kv.shape, block), file.block(kv.shape, host_block))
            for block, host_block in zip(kv.blocks, kv.host, strict=True)
        ]
        after = [record_event(self._device.bytes.device)]  # the kernels that use these blocks
        kv.sent_s = time.monotonic()
        if kv.location is KvLocation.SWAPPING_OUT:
            kv.event = self._out.submit([Copy(source=device, target=host) for device, host in pairs], after)
            self.swapped_out_total += 1
        else:
            kv.event = self._in.submit([Copy(source=host, target=device) for device, host in pairs], after)
            self.swapped_in_total += 1
        self._moving.append(kv)

    def _moved(self, kv: SequenceKv) -> None:
        rate = self.rates.kv_out if kv.location is KvLocation.SWAPPING_OUT else self.rates.kv_in
        rate.learn(kv.size_bytes, kv.sent_s, [kv.event])
        if kv.location is KvLocation.SWAPPING_OUT:
            self.device_cache.free(kv.shape, kv.blocks)
            kv.blocks, kv.location = [], KvLocation.HOST
        else:
            if kv.file is None:
                self.host_cache.free(kv.shape, kv.host)
            kv.host, kv.file, kv.location = [], None, KvLocation.DEVICE
        kv.event = PASSED

    def _open(self, handle: KvHandle) -> KvFile | None:
        if handle.file not in self._files:
            try:
                memory = host_memory(0, Path(handle.file))
            except (OSError, ValueError):
                return None
            gone = [file for file in self._files if not Path(file).exists()]
            for file in gone:  # their slots ended; sequences that read them keep them open
                del self._files[file]
            self._files[handle.file] = KvFile(bytes=memory, slab_bytes=handle.slab_bytes)
        return self._files[handle.file]
