"""The KV of a replayed slot, counted in bytes: its locations, and when transfers end.

Transfers to the device and transfers from it each have a link to themselves and run one after another at the full rate.
KV uses its own region first, then the memory of offloaded layers. Cached prefixes that nobody uses take what is free,
on the device and then in host memory; blocks that several sequences share count for each of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from dataplane.engines.core.kv import DEVICE, HOST, NONE, SWAPPING_IN, SWAPPING_OUT, KvLocation, WithoutPrefixCache
from dataplane.engines.interface import KvHandle
from dataplane.engines.replay.prefixes import CachedBlocks
from dataplane.engines.replay.weights import HostLink, WeightsMemory
from dataplane.memory.prefix_keys import PrefixChain, prefix_scope

REPLAY_KV_FILE = ""
"""The file of a handle to replayed KV, which can always be read because there are no bytes."""
BLOCK_TOKENS = 16
"""Tokens of a block of a cached prefix."""
_MOVING = (SWAPPING_OUT, SWAPPING_IN)


@dataclass(eq=False, kw_only=True)
class KvShare:
    """The share of a slot's KV memory to which some models together are limited."""

    capacity_bytes: int
    used_bytes: int = 0


class SequenceKv(Struct, eq=False, kw_only=True):
    """The KV of one sequence: `device_bytes` and `host_bytes` of memory (no host memory if another slot holds it).
    A transfer moves `moved_tokens` and ends at `moved_s`; KV that another slot holds is there at `source_s`. `share`:
    the share of device memory it is limited to, if any. `chain`: the keys of its blocks, if it may share prefixes with
    others of its `model` and `adapter`; of these it uses those in `held`, and took over the first `reused`.
    """

    bytes_per_token: int
    bytes_per_s: float
    share: KvShare | None = None
    location: KvLocation = NONE
    device_bytes: int = 0
    host_bytes: int = 0
    moved_tokens: int = 0
    moved_s: float = 0.0
    source_s: float = 0.0
    model: str = ""
    adapter: str = ""
    chain: PrefixChain | None = None
    held: list[bytes] = []
    reused: int = 0

    @property
    def moved_bytes(self) -> int:
        return self.moved_tokens * self.bytes_per_token

    @property
    def size_bytes(self) -> int:
        """Its memory, on the side where it takes more."""
        return max(self.device_bytes, self.host_bytes)


class ReplayKvMemory(WithoutPrefixCache["SequenceKv"]):
    """The KV memory of a slot and of its host. Meets `dataplane.engines.core.kv.KvMemory` and, in
    `dataplane.engines.core.pressure_handler`, `KvCapacity`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        host_bytes: int,
        clock: Callable[[], float],
        weights: WeightsMemory,
        *,
        prefix_cache: bool = False,
        announces: bool = True,
    ) -> None:
        """`weights`: the models whose offloaded layers KV may use. `announces`: whether KV is exported while its
        transfer is under way.
        """
        self._announces = announces
        self._prefixes = CachedBlocks() if prefix_cache else None
        self._clock = clock
        self.capacity_bytes = capacity_bytes
        self._weights = weights
        self._host_capacity_bytes = host_bytes
        self._in, self._out = HostLink(), HostLink()
        self._moving: list[SequenceKv] = []
        self._swapping_out = 0
        """How many of them."""
        self.used_bytes = 0
        self.host_used_bytes = 0
        self.swapped_out_total = 0
        self.swapped_in_total = 0

    @property
    def spare_bytes(self) -> int:
        """The free bytes of its region and of offloaded layers; negative while KV is in layers of an evicted model."""
        return self.capacity_bytes + self._weights.offloaded_bytes - self.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can be allocated now."""
        spare_bytes = self.capacity_bytes + self._weights.offloaded_bytes - self.used_bytes
        return spare_bytes if spare_bytes > 0 else 0

    @property
    def out_of_region_bytes(self) -> int:
        """KV in the memory of layers, offloaded or of an evicted model."""
        return max(self.used_bytes - self.capacity_bytes, 0)

    @property
    def swap_out_wait_s(self) -> float:
        return self._out.wait_s(self._clock())

    @property
    def freeing(self) -> bool:
        return self._swapping_out > 0

    @property
    def next_move_s(self) -> float | None:
        """When the next transfer ends; None if there is none."""
        return min([kv.moved_s for kv in self._moving]) if self._moving else None

    def link_bytes_per_s(self, kv: SequenceKv) -> tuple[float, float]:
        return kv.bytes_per_s, kv.bytes_per_s

    def missing_bytes(self, kv: SequenceKv, tokens: int) -> int:
        wanted_bytes = kv.moved_bytes if kv.location is HOST else tokens * kv.bytes_per_token
        return max(wanted_bytes - kv.device_bytes - self._spare_bytes_of(kv), 0)

    def host_fits(self, kv: SequenceKv, tokens: int) -> bool:
        return tokens * kv.bytes_per_token <= self._host_capacity_bytes - self.host_used_bytes

    def fits(self, kv: SequenceKv, *, spare: int) -> bool:
        """See `KvMemory`; a block is a token here."""
        return kv.moved_bytes + spare * kv.bytes_per_token <= self._spare_bytes_of(kv)

    def swap_s(self, kvs: Iterable[SequenceKv]) -> float:
        moved_s = moved_bytes = 0.0
        for kv in kvs:
            moved_s += 2 * kv.moved_bytes / kv.bytes_per_s
            moved_bytes += kv.moved_bytes
        return moved_s * min(self.capacity_bytes / moved_bytes, 1.0) if moved_bytes else 0.0

    def grow(self, kv: SequenceKv, tokens: int) -> bool:
        more_bytes = tokens * kv.bytes_per_token - kv.device_bytes
        if more_bytes > 0 and more_bytes > self._spare_bytes_of(kv):
            return False
        begins, loaded = kv.location is NONE, 0
        kv.location = DEVICE
        if begins:
            loaded = self._take_over(kv)
        if more_bytes > 0:
            self._take(kv, more_bytes)
        if loaded:
            kv.moved_tokens = loaded * BLOCK_TOKENS
            self._move(kv, SWAPPING_IN, self._in)
        return True

    def track(self, kv: SequenceKv, tokens: Sequence[int], salt: str) -> None:
        if self._prefixes is not None:
            kv.chain = PrefixChain(prefix_scope(kv.model, kv.adapter, salt), tokens, BLOCK_TOKENS)

    def reused_tokens(self, kv: SequenceKv) -> int:
        return kv.reused * BLOCK_TOKENS

    def computed(self, kv: SequenceKv, tokens: int) -> None:
        full = tokens // BLOCK_TOKENS
        if kv.chain is None or self._prefixes is None or full <= len(kv.held):
            return
        more = kv.chain.keys(full)[len(kv.held) :]
        self._prefixes.add(more)
        kv.held += more

    def _take_over(self, kv: SequenceKv) -> int:
        """Use the longest cached prefix; returns how many of its blocks are in host memory."""
        kv.reused, loaded = 0, 0
        if kv.chain is not None and self._prefixes is not None:
            keys = kv.chain.keys(kv.chain.reusable_blocks)
            kv.reused, loaded = self._prefixes.take(keys)
            kv.held = keys[: kv.reused]
        return loaded

    def _let_go(self, kv: SequenceKv) -> None:
        """Let the cache evict the blocks of KV that leaves the device."""
        if kv.held and self._prefixes is not None:
            self._prefixes.release(kv.held, BLOCK_TOKENS * kv.bytes_per_token)
            kv.held = []
            self._evict_prefixes(self._prefixes)

    def _evict_prefixes(self, prefixes: CachedBlocks) -> None:
        """Evict what no longer fits beside the KV of sequences."""
        prefixes.evict(self.free_bytes, max(self._host_capacity_bytes - self.host_used_bytes, 0))

    def grow_unseen(self, size_bytes: int) -> None:
        """Allocate free bytes that the caller assigns to sequences later."""
        self.used_bytes += size_bytes
        assert self.spare_bytes >= 0

    def swap_out(self, kv: SequenceKv, tokens: int) -> bool:
        assert kv.location is DEVICE
        if not self.host_fits(kv, tokens):
            return False
        size_bytes = tokens * kv.bytes_per_token
        self._take(kv, size_bytes - kv.device_bytes)
        self.host_used_bytes += size_bytes
        kv.host_bytes = size_bytes
        self._let_go(kv)
        kv.moved_tokens = tokens
        self._move(kv, SWAPPING_OUT, self._out)
        self.swapped_out_total += 1
        return True

    def swap_in(self, kv: SequenceKv) -> bool:
        assert kv.location is HOST
        size_bytes = kv.moved_bytes
        if size_bytes > self._spare_bytes_of(kv):
            return False
        self._take(kv, size_bytes)
        self._move(kv, SWAPPING_IN, self._in)
        self.swapped_in_total += 1
        return True

    def adopt(self, kv: SequenceKv, handle: KvHandle) -> bool:
        assert kv.location is NONE
        if handle.file != REPLAY_KV_FILE:
            return False
        kv.location, kv.moved_tokens, kv.source_s = HOST, handle.tokens, handle.passes_s
        return True

    def can_export(self, kv: SequenceKv) -> bool:
        return kv.location is HOST or (kv.location is SWAPPING_OUT and self._announces)

    def handle(self, kv: SequenceKv, tokens: int) -> KvHandle:
        assert self.can_export(kv)
        return KvHandle(
            file=REPLAY_KV_FILE, slab_bytes=0, shape=(0, 0, 0, 0, 0), blocks=(), tokens=tokens, passes_s=kv.moved_s
        )

    def drop(self, kv: SequenceKv) -> None:
        if kv.location is NONE:
            return
        if kv.location in _MOVING:
            self._stop(kv)
        self._take(kv, -kv.device_bytes)
        self._free_host(kv)
        kv.location, kv.source_s = NONE, 0.0
        self._let_go(kv)

    def settle(self) -> None:
        """Complete the transfers that have ended."""
        if not self._moving:
            return
        now_s = self._clock()
        for kv in [kv for kv in self._moving if kv.moved_s <= now_s]:
            self._stop(kv)
            if kv.location is SWAPPING_OUT:
                self._take(kv, -kv.device_bytes)
                kv.location = HOST
            else:
                self._free_host(kv)
                kv.location, kv.source_s = DEVICE, 0.0

    def _move(self, kv: SequenceKv, location: KvLocation, link: HostLink) -> None:
        kv.location = location
        kv.moved_s = link.send(kv.moved_bytes / kv.bytes_per_s, max(self._clock(), kv.source_s))
        self._moving.append(kv)
        self._swapping_out += location is SWAPPING_OUT

    def _stop(self, kv: SequenceKv) -> None:
        """Take KV from those that move: its transfer has ended, or nobody needs it."""
        self._moving.remove(kv)
        self._swapping_out -= kv.location is SWAPPING_OUT

    def _spare_bytes_of(self, kv: SequenceKv) -> int:
        """The bytes by which this KV may grow; negative while its memory is exceeded."""
        share = kv.share
        return self.spare_bytes if share is None else min(self.spare_bytes, share.capacity_bytes - share.used_bytes)

    def _take(self, kv: SequenceKv, more_bytes: int) -> None:
        self.used_bytes += more_bytes
        kv.device_bytes += more_bytes
        if kv.share is not None:
            kv.share.used_bytes += more_bytes
        if more_bytes > 0 and self._prefixes is not None:
            self._evict_prefixes(self._prefixes)

    def _free_host(self, kv: SequenceKv) -> None:
        self.host_used_bytes -= kv.host_bytes
        kv.host_bytes = 0
