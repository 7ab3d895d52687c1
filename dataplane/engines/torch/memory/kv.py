"""KV of a slot: blocks in the arena, blocks in host memory, and the transfers between them.

Full blocks are shared by sequences that begin alike, and are cached when nobody uses them (`prefixes.py`). A sequence
writes behind its full blocks only, so that shared blocks never change; what it swaps out are copies.

Three rules (Aegaeon 5.3), each enforced at one point. A step reads a sequence's KV only when it is on the DEVICE: KV
that is being transferred has an event that must pass first (`settle`). The next transfer of a sequence begins when its
last one has passed. Blocks that a transfer reads or writes are not allocated again until its event has passed.
"""

import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path

import torch

from dataplane.engines.core.kv import DEVICE, HOST, NONE, SWAPPING_IN, SWAPPING_OUT, KvLocation
from dataplane.engines.interface import KvHandle
from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.copies.open import pinned, record_event, unpinned
from dataplane.engines.torch.memory.kv_exports import KvExports
from dataplane.engines.torch.memory.kv_file import KvFile, host_memory
from dataplane.engines.torch.memory.kv_imports import ImportedFile, KvImports
from dataplane.engines.torch.memory.prefixes import Memory, PrefixStore
from dataplane.engines.torch.memory.transfer_rates import TransferRates
from dataplane.memory.events import PASSED, AllOf, Event
from dataplane.memory.kv_cache import HostSlabs, KvCache, KvShape, OutOfBlocksError, blocks_for
from dataplane.memory.prefix_cache import PrefixCache
from dataplane.memory.prefix_keys import PrefixChain, prefix_scope
from dataplane.memory.shared_events import SharedTransfer
from dataplane.memory.slabs import SlabArena

TRIES_MAX = 5
"""How often in a row a transfer of a sequence's KV may fail before it is dropped and recomputed."""

POLL_S = 0.0002
AWAIT_MAX_S = 0.02

RESERVE_SHARE = 16
"""One in so many slabs of the KV region is kept free of cached prefixes, where host memory can take them."""


@dataclass(eq=False, kw_only=True)
class SequenceKv:
    """The KV of one sequence of a `model`, whose weights have a `layout`, with an `adapter` or none. `blocks` in the
    arena, `host` in host memory, or in `file` of another slot, where they are when `source` has passed. `exported`: the
    event that other slots wait for while it is SWAPPING_OUT. `chain`: its keys, None if it shares nothing; of its
    full blocks the first `keyed` are cached or known to be, the first `reused` were taken over, and those of
    `computing` are being computed here.
    """

    shape: KvShape
    model: str = ""
    layout: str = ""
    adapter: str = ""
    chain: PrefixChain | None = None
    keyed: int = 0
    reused: int = 0
    computing: list[bytes] = field(default_factory=list)
    location: KvLocation = NONE
    blocks: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    file: ImportedFile | None = None
    source: Event = PASSED
    exported: SharedTransfer | None = None
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

    On a slot of several `ranks` it is the first one's, and its file has a part for each rank, one after another. With
    `exports`, other slots are told of KV whose transfer is under way.
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
        prefix_cache: bool = True,
        ranks: int = 1,
        imports: KvImports | None = None,
        exports: KvExports | None = None,
    ) -> None:
        self._device = KvFile(bytes=buffer, slab_bytes=slab_bytes)
        self._arena = arena
        self.device_cache = KvCache(arena, slab_bytes)
        self._host_slabs = HostSlabs(host_bytes // slab_bytes)
        self.host_cache = KvCache(self._host_slabs, slab_bytes)
        self._host_file, self._ranks = host_file, ranks
        self.imports, self._exports = imports or KvImports(buffer.device, None), exports
        size_bytes = self._host_slabs.slabs * slab_bytes
        memory = host_memory(size_bytes if host_file is None else ranks * size_bytes, host_file)[:size_bytes]
        self._host = KvFile(bytes=pinned(memory, buffer.device), slab_bytes=slab_bytes)
        self._make_stream = make_stream
        self._in, self._out = make_stream("kv_in"), make_stream("kv_out")
        self.rates = rates
        self._views: dict[tuple[KvShape, torch.dtype], torch.Tensor] = {}
        self._moving: list[SequenceKv] = []
        self._prefix_cache = prefix_cache
        self._computing: dict[bytes, SequenceKv] = {}
        has_host = prefix_cache and self._host_slabs.slabs > 0
        self._prefixes = PrefixStore(
            Memory(file=self._device, blocks=self.device_cache, prefixes=PrefixCache(self.device_cache)),
            Memory(file=self._host, blocks=self.host_cache, prefixes=PrefixCache(self.host_cache)),
            stream_in=self._in,
            stream_out=self._out,
            rates=rates,
            reserve_bytes=self.kv_slabs // RESERVE_SHARE * slab_bytes if has_host else 0,
            free_bytes=lambda: self.device_cache.free_bytes() + arena.free_kv_slabs * slab_bytes,
        )
        self.swapped_out_total = 0
        self.swapped_in_total = 0

    def close(self) -> None:
        """Unpin the host memory. No copy is under way, and none follows."""
        if self._exports is not None:
            self._exports.close()
        self.imports.close()
        unpinned(self._host.bytes, self._device.bytes.device)

    @property
    def host_bytes(self) -> torch.Tensor:
        """The host memory of this slot, flat uint8."""
        return self._host.bytes

    @property
    def slab_bytes(self) -> int:
        return self._device.slab_bytes

    @property
    def kv_slabs(self) -> int:
        """Slabs of the KV region."""
        return self._arena.slabs - self._arena.weights_slabs

    @property
    def moving(self) -> bool:
        return bool(self._moving or self._prefixes.in_flight)

    @property
    def evicting(self) -> bool:
        return self._prefixes.evicting

    @property
    def freeing(self) -> bool:
        return self.preempting or self.evicting

    @property
    def preempting(self) -> bool:
        """Whether sequences are being swapped out, or a transfer reads offloaded layers, whose slabs KV gets then."""
        return self._arena.lent_in_transfer or any(kv.location is SWAPPING_OUT for kv in self._moving)

    @property
    def swap_out_wait_s(self) -> float:
        leaving_bytes = sum(kv.size_bytes for kv in self._moving if kv.location is SWAPPING_OUT)
        return leaving_bytes / self.rates.kv_out.bytes_per_s

    def link_bytes_per_s(self, kv: SequenceKv) -> tuple[float, float]:
        return self.rates.kv_out.bytes_per_s, self.rates.kv_in.bytes_per_s

    def swap_s(self, kvs: Iterable[SequenceKv]) -> float:
        most_bytes = (self._arena.slabs - self._arena.kv_from) * self.slab_bytes
        moved_bytes = min(sum(kv.size_bytes for kv in kvs), most_bytes)
        return moved_bytes / self.rates.kv_out.bytes_per_s + moved_bytes / self.rates.kv_in.bytes_per_s

    def fits(self, kv: SequenceKv, *, spare: int) -> bool:
        return self.free_blocks(kv.shape) >= len(kv.host) + spare

    def free_blocks(self, shape: KvShape) -> int:
        """Blocks of this shape that could be allocated now, once idle ones are evicted."""
        cache, idle = self.device_cache, self._prefixes.device.prefixes.allocatable_blocks(shape)
        return cache.free_blocks(shape) + self._arena.free_kv_slabs * cache.blocks_per_slab(shape) + idle

    def missing_bytes(self, kv: SequenceKv, tokens: int) -> int:
        """See `KvCapacity`; in whole slabs."""
        wanted = len(kv.host) if kv.location is HOST else blocks_for(tokens, kv.shape.block_tokens)
        missing_blocks = wanted - len(kv.blocks) - self.free_blocks(kv.shape)
        missing_slabs = -(-missing_blocks // self.device_cache.blocks_per_slab(kv.shape))
        return max(missing_slabs, 0) * self._device.slab_bytes

    def host_fits(self, kv: SequenceKv, tokens: int) -> bool:
        idle_blocks = self._prefixes.host.prefixes.allocatable_blocks(kv.shape)
        free_blocks = self._host_slabs.free_slabs * self.host_cache.blocks_per_slab(kv.shape) + idle_blocks
        return blocks_for(tokens, kv.shape.block_tokens) <= free_blocks + self.host_cache.free_blocks(kv.shape)

    def lies_in(self, kv: SequenceKv, slabs: Container[int]) -> bool:
        """Whether one of its blocks is in one of these slabs of the arena."""
        per_slab = self.device_cache.blocks_per_slab(kv.shape)
        return any(block // per_slab in slabs for block in kv.blocks)

    def view(self, shape: KvShape, dtype: torch.dtype) -> torch.Tensor:
        """The arena as blocks of a shape; see `KvFile.view`."""
        if (shape, dtype) not in self._views:
            self._views[shape, dtype] = self._device.view(shape, dtype)
        return self._views[shape, dtype]

    def capacity_blocks(self, shape: KvShape) -> int:
        """Blocks of this shape that fit in the KV region."""
        return self.kv_slabs * self.device_cache.blocks_per_slab(shape)

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
        """Assert that the blocks in use are those of `held`, of which only cached ones are shared, and copies that are
        being transferred.
        """
        self.device_cache.check()
        self.host_cache.check()
        self._prefixes.device.prefixes.check((kv.shape, block) for kv in held for block in kv.blocks)
        own = [(kv.shape, block) for kv in held if kv.file is None for block in kv.host]
        self._prefixes.host.prefixes.check([*own, *self._prefixes.copies_in_use])
        if self._exports is not None:
            self._exports.check(kv.exported for kv in held if kv.exported is not None)

    def grow(self, kv: SequenceKv, tokens: int) -> bool:
        missing = blocks_for(tokens, kv.shape.block_tokens) - len(kv.blocks)
        if kv.location is NONE:
            return self._begin(kv, missing)
        if missing > 0:
            blocks = self._prefixes.allocate(kv.shape, missing)
            if blocks is None:
                return False
            kv.blocks += blocks
        return True

    def reserve(self, kv: SequenceKv, tokens: int) -> bool:
        """As `grow` for KV on the DEVICE, out of free memory alone: what is needed a step later evicts nothing now."""
        missing = blocks_for(tokens, kv.shape.block_tokens) - len(kv.blocks)
        if missing > 0:
            try:
                kv.blocks += self.device_cache.allocate(kv.shape, missing)
            except OutOfBlocksError:
                return False
        return True

    def _begin(self, kv: SequenceKv, wanted: int) -> bool:
        """Take over the longest cached prefix, and allocate the rest of so many blocks."""
        keys = [] if kv.chain is None else kv.chain.keys(min(kv.chain.reusable_blocks, wanted))
        taken = self._prefixes.take(keys)
        copies = len(taken) - sum(self._prefixes.is_placed(entry) for entry in taken)
        blocks = self._prefixes.allocate(kv.shape, wanted - len(taken) + copies)
        if blocks is None:
            self._prefixes.give_back(taken)
            return False
        placed, waits = self._prefixes.place(taken, blocks[:copies])
        kv.blocks = placed + blocks[copies:]
        kv.reused = kv.keyed = len(placed)
        kv.computing = keys[len(placed) :]
        self._computing.update(dict.fromkeys(kv.computing, kv))
        kv.location = DEVICE
        if waits:
            kv.location, kv.event, kv.tries = SWAPPING_IN, AllOf(waits), TRIES_MAX
            self._moving.append(kv)
        return True

    def track(self, kv: SequenceKv, tokens: Sequence[int], salt: str) -> None:
        if self._prefix_cache:
            scope = prefix_scope(kv.model, kv.adapter, kv.layout, repr(kv.shape), salt)
            kv.chain = PrefixChain(scope, tokens, kv.shape.block_tokens)

    def reused_tokens(self, kv: SequenceKv) -> int:
        return kv.reused * kv.shape.block_tokens

    def awaited(self, kv: SequenceKv) -> SequenceKv | None:
        if kv.chain is None or not self._computing:
            return None
        keys = kv.chain.keys(kv.chain.reusable_blocks)
        missing = list(dropwhile(self._prefixes.knows, keys))
        computing = self._computing.get(missing[0]) if missing else None
        if computing is None:
            return None
        awaited = sum(1 for _ in takewhile(self._computing.__contains__, missing))
        return computing if 2 * awaited > max(len(missing), len(computing.computing) // 2) else None

    def computed(self, kv: SequenceKv, tokens: int) -> None:
        full = tokens // kv.shape.block_tokens
        if kv.chain is None or full <= kv.keyed:
            return
        for index, key in enumerate(kv.chain.keys(full)[kv.keyed :], kv.keyed):
            self._prefixes.device.prefixes.add(key, kv.model, kv.shape, kv.blocks[index])
        kv.keyed = full
        self._end_computing(kv)

    def _end_computing(self, kv: SequenceKv) -> None:
        for key in kv.computing:
            if self._computing.get(key) is kv:
                del self._computing[key]
        kv.computing = []

    def bytes_of(self, kvs: Iterable[SequenceKv]) -> int:
        blocks: dict[KvShape, set[int]] = {}
        host_bytes = 0
        for kv in kvs:
            if len(kv.host) > len(kv.blocks):
                host_bytes += kv.size_bytes
            else:
                blocks.setdefault(kv.shape, set()).update(kv.blocks)
        return host_bytes + sum(len(mine) * shape.block_bytes for shape, mine in blocks.items())

    def clearable_slabs(self) -> list[int]:
        """Slabs of the arena with cached KV only: free as soon as they are cleared, and transfers have ended."""
        return self.device_cache.clearable_slabs()

    def clear(self, slabs: Iterable[int], *, now: bool = False) -> None:
        """Evict the cached KV that no sequence uses from some slabs: to host memory, or `now`, without a copy."""
        self._prefixes.clear(slabs, now=now)

    def forget(self, model: str) -> None:
        """Forget a model's cached KV."""
        self._prefixes.forget(model)

    def swap_out(self, kv: SequenceKv, tokens: int) -> bool:
        assert kv.location is DEVICE
        needed = blocks_for(tokens, kv.shape.block_tokens)
        host = self._prefixes.allocate_host(kv.shape, needed)
        if host is None:
            return False
        kv.host = host
        self._release(kv, kv.blocks[needed:])
        kv.blocks = kv.blocks[:needed]
        kv.location, kv.tries = SWAPPING_OUT, 0
        if self._exports is not None:
            kv.exported = self._exports.begin()
        self._send(kv)
        return True

    def swap_in(self, kv: SequenceKv) -> bool:
        assert kv.location is HOST
        blocks = self._prefixes.allocate(kv.shape, len(kv.host))
        if blocks is None:
            return False
        kv.blocks, kv.keyed = blocks, 0
        kv.location, kv.tries = SWAPPING_IN, 0
        self._send(kv)
        return True

    def settle(self) -> None:
        """Complete the transfers that have ended: free their source, or repeat them if they failed."""
        self._arena.settle()
        self.device_cache.settle()
        self.host_cache.settle()
        self.imports.check()
        if self._exports is not None:
            self._exports.settle()
        for kv in [kv for kv in self._moving if kv.event.done()]:
            self._moving.remove(kv)
            if kv.event.error is None:
                self._moved(kv)
            elif kv.tries < TRIES_MAX and kv.source.error is None:
                kv.tries += 1
                self._send(kv)
            else:
                self.drop(kv)
        self._prefixes.settle()

    def await_one(self) -> None:
        """Wait until a transfer has ended, if some are under way; not for long, as one may wait for another slot."""
        events = [kv.event for kv in self._moving] or self._prefixes.in_flight[:1]
        until_s = time.monotonic() + AWAIT_MAX_S
        while events and not any(event.done() for event in events) and time.monotonic() < until_s:
            time.sleep(POLL_S)

    def drop(self, kv: SequenceKv) -> None:
        """See `KvMemory`; blocks of a transfer are freed when it has ended."""
        if kv in self._moving:
            self._moving.remove(kv)
        self._end_computing(kv)
        self._release(kv, kv.blocks, after=kv.event)
        if kv.host and kv.file is None:
            self.host_cache.free(kv.shape, kv.host, after=kv.event)
        if kv.exported is not None and self._exports is not None:
            self._exports.release(kv.exported, after=kv.event)
        self._leave_file(kv)
        kv.source, kv.exported = PASSED, None
        kv.blocks, kv.host, kv.keyed, kv.reused = [], [], 0, 0
        kv.location, kv.event = NONE, PASSED

    def can_export(self, kv: SequenceKv) -> bool:
        return kv.location is HOST or (kv.location is SWAPPING_OUT and kv.exported is not None)

    def handle(self, kv: SequenceKv, tokens: int) -> KvHandle:
        assert self.can_export(kv)
        under_way = kv.exported if kv.location is SWAPPING_OUT else None
        assert self._host_file is not None, "the settings require a file where KV is exported"
        shape = kv.shape
        return KvHandle(
            file=str(self._host_file),
            slab_bytes=self._host.slab_bytes,
            shape=(shape.layers, shape.kv_heads, shape.head_dim, shape.block_tokens, shape.itemsize),
            blocks=tuple(kv.host),
            tokens=tokens,
            ranks=self._ranks,
            event=None if under_way is None or self._exports is None else self._exports.announced(under_way),
        )

    def adopt(self, kv: SequenceKv, handle: KvHandle) -> bool:
        """See `KvMemory`; also False if it has another shape, or is divided among another number of ranks: the shapes
        are the same then where ranks have copies of a KV head.
        """
        layers, kv_heads, head_dim, block_tokens, itemsize = handle.shape
        shape = KvShape(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens, itemsize=itemsize
        )
        same = (shape, handle.ranks) == (kv.shape, self._ranks)
        opened = self.imports.open(handle) if same else None
        if opened is None:
            return False
        file, source = opened
        slabs = file.bytes.numel() // file.slab_bytes
        if not all(0 <= block < slabs * (file.slab_bytes // shape.block_bytes) for block in handle.blocks):
            return False
        kv.file, kv.source, kv.host, kv.location = file, source, list(handle.blocks), HOST
        file.readers += 1
        return True

    @staticmethod
    def _leave_file(kv: SequenceKv) -> None:
        if kv.file is not None:
            kv.file.readers -= 1
            kv.file = None

    def _send(self, kv: SequenceKv) -> None:
        file = kv.file or self._host
        pairs = [
            (self._device.block(kv.shape, block), file.block(kv.shape, host_block))
            for block, host_block in zip(kv.blocks, kv.host, strict=True)
        ]
        after = [record_event(self._device.bytes.device)]  # the kernels that use these blocks
        kv.sent_s = time.monotonic()
        if kv.location is SWAPPING_OUT:
            kv.event = self._out.submit([Copy(source=device, target=host) for device, host in pairs], after)
            self.swapped_out_total += 1
            if kv.exported is not None and self._exports is not None:
                self._exports.follow(kv.exported, kv.event)
        else:
            if kv.source.done() and kv.source.error is None:
                kv.source = PASSED
            after.append(kv.source)
            stream = self._in if kv.source is PASSED else self._make_stream("kv_imports")  # those behind it wait, too
            kv.event = stream.submit([Copy(source=host, target=device) for device, host in pairs], after)
            self.swapped_in_total += 1
            if kv.file is not None:
                self.imports.note_copy(kv.file, kv.event)
        self._moving.append(kv)

    def _release(self, kv: SequenceKv, blocks: Sequence[int], after: Event = PASSED) -> None:
        self._prefixes.device.prefixes.release(kv.shape, blocks, after)

    def _moved(self, kv: SequenceKv) -> None:
        if not kv.host:  # only its cached prefix has arrived
            kv.location, kv.event = DEVICE, PASSED
            return
        rate = self.rates.kv_out if kv.location is SWAPPING_OUT else self.rates.kv_in
        if kv.source is PASSED:  # else its copy has waited for that
            rate.learn(kv.size_bytes, kv.sent_s, [kv.event])
        if kv.location is SWAPPING_OUT:
            self._release(kv, kv.blocks)
            kv.blocks, kv.location = [], HOST
        else:
            if kv.file is None:
                self.host_cache.free(kv.shape, kv.host)
            self._leave_file(kv)
            kv.host, kv.location = [], DEVICE
        kv.event = kv.source = PASSED
