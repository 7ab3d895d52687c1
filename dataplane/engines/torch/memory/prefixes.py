"""Cached prefixes of a slot: blocks in the arena, copies in host memory, and the transfers between them.

A block that is evicted from the arena is copied to host memory, if that has room or colder copies; its own memory is
free after the copy. A copy that is found is transferred to a new block; both then hold the key, and the block can be
evicted without another transfer. A copy is evicted by forgetting it.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.copies.open import record_event
from dataplane.engines.torch.memory.kv_file import KvFile
from dataplane.engines.torch.memory.transfer_rates import TransferRates
from dataplane.memory.events import Event
from dataplane.memory.kv_cache import KvCache, KvShape, OutOfBlocksError
from dataplane.memory.prefix_cache import CachedBlock, PrefixCache


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Of the KV in `copies` from the device to host memory, or from there to `blocks`."""

    event: Event
    sent_s: float
    copies: tuple[CachedBlock, ...]
    blocks: tuple[CachedBlock, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(copy.shape.block_bytes for copy in self.copies)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One side: its bytes, its blocks, and its cached ones."""

    file: KvFile
    blocks: KvCache
    prefixes: PrefixCache

    def allocate(
        self, shape: KvShape, count: int, evict: Callable[[Sequence[CachedBlock]], None], *, leaving: int = 0
    ) -> list[int] | None:
        """Allocate blocks, evicting cached ones where needed; None if even that frees too few now. `leaving`: how many
        are free soon in any case.
        """
        try:
            return self.blocks.allocate(shape, count)
        except OutOfBlocksError as error:
            evict(self.prefixes.coldest(shape, error.missing_blocks - leaving))
        try:
            return self.blocks.allocate(shape, count)
        except OutOfBlocksError:
            return None

    def usable(self, key: bytes) -> CachedBlock | None:
        """The block of a key, unless its transfer failed."""
        entry = self.prefixes.find(key)
        return entry if entry is not None and (not entry.arrival.done() or entry.arrival.error is None) else None


class PrefixStore:
    """The cached prefixes of one slot. `free_bytes()`: free device memory; where it is below `reserve_bytes`, blocks
    are evicted ahead of need, so that few requests wait for a copy.
    """

    def __init__(
        self,
        device: Memory,
        host: Memory,
        *,
        stream_in: CopyStream,
        stream_out: CopyStream,
        rates: TransferRates,
        reserve_bytes: int,
        free_bytes: Callable[[], int],
    ) -> None:
        self.device = device
        self.host = host
        self._in, self._out = stream_in, stream_out
        self._rates = rates
        self._reserve_bytes = reserve_bytes
        self._free_bytes = free_bytes
        self._saves: list[Transfer] = []
        self._loads: list[Transfer] = []

    @property
    def evicting(self) -> bool:
        """Whether a transfer to host memory is under way, after which memory in the arena is free."""
        return bool(self._saves)

    @property
    def in_flight(self) -> list[Event]:
        return [transfer.event for transfer in (*self._saves, *self._loads)]

    def allocate(self, shape: KvShape, count: int) -> list[int] | None:
        """Blocks in the arena. None if free memory and idle blocks are too few, or the latter are being copied; who
        asks again meanwhile evicts no others for it.
        """
        leaving = self.device.prefixes.leaving_blocks(shape) if self._saves else 0
        return self.device.allocate(shape, count, self.evict, leaving=leaving)

    def allocate_host(self, shape: KvShape, count: int) -> list[int] | None:
        return self.host.allocate(shape, count, self._forget_copies)

    @property
    def copies_in_use(self) -> list[tuple[KvShape, int]]:
        """The copies that are being transferred to the device, one for each transfer."""
        return [(copy.shape, copy.block) for transfer in self._loads for copy in transfer.copies]

    def knows(self, key: bytes) -> bool:
        """Whether the key is cached on either side."""
        return self.device.usable(key) is not None or self.host.usable(key) is not None

    def is_placed(self, entry: CachedBlock) -> bool:
        """Whether it is a block in the arena, and no copy."""
        return self.device.prefixes.find(entry.key) is entry

    def take(self, keys: Sequence[bytes]) -> list[CachedBlock]:
        """Take a reference to the blocks of the longest cached prefix, or to their copies where there is no block."""
        taken: list[CachedBlock] = []
        for key in keys:
            side = self.device
            entry = side.usable(key)
            if entry is None:
                side = self.host
                entry = side.usable(key)
                if entry is None or not entry.arrival.done():
                    break
            side.prefixes.take(entry)
            taken.append(entry)
        return taken

    def give_back(self, taken: Iterable[CachedBlock]) -> None:
        for entry in reversed(list(taken)):
            side = self.device if self.is_placed(entry) else self.host
            side.prefixes.release(entry.shape, [entry.block])

    def place(self, taken: Sequence[CachedBlock], blocks: Sequence[int]) -> tuple[list[int], list[Event]]:
        """The blocks in the arena of a prefix that was taken, and the events of those that are still to arrive. Copies
        are transferred to `blocks`, one each.
        """
        free = iter(blocks)
        placed: list[int] = []
        copies: list[CachedBlock] = []
        for entry in taken:
            if self.is_placed(entry):
                placed.append(entry.block)
            else:
                placed.append(next(free))
                copies.append(entry)
        waits = [entry.arrival for entry in taken if not entry.arrival.done()]
        if copies:
            waits.append(self._load(copies, blocks))
        return placed, waits

    def evict(self, entries: Sequence[CachedBlock], *, save: bool = True) -> None:
        """Evict idle blocks, listed from the least recently used on. They are copied to host memory first, unless a
        copy is there already or there is no room for one.
        """
        unsaved = []
        for entry in entries:
            copy = self.host.prefixes.find(entry.key)
            if copy is not None:  # it is as recent as the block was
                self.host.prefixes.take(copy)
                self.host.prefixes.release(copy.shape, [copy.block])
            elif save and entry.arrival.done() and entry.arrival.error is None:
                unsaved.append(entry)
        self._save(unsaved)
        for entry in entries:
            self.device.prefixes.evict(entry)

    def clear(self, slabs: Iterable[int], *, now: bool) -> None:
        """Evict the idle blocks in some slabs of the arena. `now`: without a copy."""
        self.evict(self.device.prefixes.within(slabs), save=not now)

    def forget(self, model: str) -> None:
        """Forget all of a model's KV."""
        for side in (self.device, self.host):
            side.prefixes.forget(model)

    def settle(self) -> None:
        """Complete the transfers that have ended, and evict ahead of need."""
        for transfer in [transfer for transfer in self._saves if transfer.event.done()]:
            self._saves.remove(transfer)
            if transfer.event.error is None:
                self._rates.kv_out.learn(transfer.size_bytes, transfer.sent_s, [transfer.event])
            else:
                self._forget_copies(transfer.copies)
        for transfer in [transfer for transfer in self._loads if transfer.event.done()]:
            self._loads.remove(transfer)
            self.give_back(transfer.copies)
            if transfer.event.error is None:
                self._rates.kv_in.learn(transfer.size_bytes, transfer.sent_s, [transfer.event])
            else:  # the prefix is computed again, and not transferred again
                self._forget_copies(transfer.copies)
                for block in transfer.blocks:
                    self.device.prefixes.evict(block)
        missing_bytes = self._reserve_bytes - self._free_bytes()
        if missing_bytes > 0 and not self._saves:
            self.evict(self.device.prefixes.oldest(missing_bytes))

    def _forget_copies(self, copies: Iterable[CachedBlock]) -> None:
        for copy in copies:
            self.host.prefixes.evict(copy)

    def _save(self, entries: Sequence[CachedBlock]) -> None:
        """Copy blocks to host memory, as many as have room there, the most recently used first."""
        saved: list[tuple[CachedBlock, int]] = []
        for entry in reversed(entries):
            room = self.allocate_host(entry.shape, 1)
            if room is None:
                break
            saved.insert(0, (entry, room[0]))
        if not saved:
            return
        device, host = self.device.file, self.host.file
        event = self._out.submit(
            [Copy(source=device.block(e.shape, e.block), target=host.block(e.shape, block)) for e, block in saved],
            [record_event(device.bytes.device)],
        )
        copies = []
        for entry, block in saved:
            entry.in_use_until(event)
            copy = self.host.prefixes.add(entry.key, entry.owner, entry.shape, block, arrival=event)
            assert copy is not None, "the key had no copy"
            copies.append(copy)
            self.host.prefixes.release(entry.shape, [block])
        self._saves.append(Transfer(event=event, sent_s=time.monotonic(), copies=tuple(copies)))

    def _load(self, copies: Sequence[CachedBlock], blocks: Sequence[int]) -> Event:
        """Transfer copies to blocks, which hold their keys then."""
        device, host = self.device.file, self.host.file
        pairs = list(zip(copies, blocks, strict=True))
        event = self._in.submit(
            [Copy(source=host.block(c.shape, c.block), target=device.block(c.shape, block)) for c, block in pairs],
            [record_event(device.bytes.device)],
        )
        made = [self.device.prefixes.add(c.key, c.owner, c.shape, block, arrival=event) for c, block in pairs]
        arriving = tuple(entry for entry in made if entry is not None)
        self._loads.append(Transfer(event=event, sent_s=time.monotonic(), copies=tuple(copies), blocks=arriving))
        return event
