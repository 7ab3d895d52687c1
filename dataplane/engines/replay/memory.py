"""The KV of a replayed slot, counted in bytes: where it is, and when what moves arrives.

KV on its way in and KV on its way out each have a wire to themselves, over which transfers go one after another at the
full rate. KV lies in its own memory first; what has no room there lies in layers that models lend.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dataplane.engines.core.kv import KvLocation
from dataplane.engines.interface import KvHandle
from dataplane.engines.replay.weights import WeightsMemory, Wire

REPLAY_KV_FILE = ""
"""The file of a handle to replayed KV. It can always be read: there is nothing in it."""
_MOVING = (KvLocation.SWAPPING_OUT, KvLocation.SWAPPING_IN)


@dataclass(eq=False, kw_only=True)
class KvShare:
    """The part of a slot's KV memory that some models are limited to, together."""

    capacity_bytes: int
    used_bytes: int = 0


@dataclass(eq=False, kw_only=True)
class SequenceKv:
    """The KV of one sequence. `here_bytes` of the slot's memory, `host_bytes` of its host memory (none where another
    slot keeps it). `moved_tokens` is what a transfer moves, `moved_s` when that is over. `share`: the part of the
    slot's memory that it may lie in; None: all of it.
    """

    bytes_per_token: int
    bytes_per_s: float
    share: KvShare | None = None
    location: KvLocation = KvLocation.NONE
    here_bytes: int = 0
    host_bytes: int = 0
    moved_tokens: int = 0
    moved_s: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """What a transfer moves."""
        return self.moved_tokens * self.bytes_per_token

    @property
    def size_bytes(self) -> int:
        """What it takes, on the side where it takes more."""
        return max(self.here_bytes, self.host_bytes)


class ReplayKvMemory:
    """KV of a slot and of its host memory. Meets `dataplane.engines.core.kv.KvMemory`."""

    def __init__(
        self,
        capacity_bytes: int,
        host_bytes: int,
        clock: Callable[[], float],
        weights: WeightsMemory,
    ) -> None:
        """`weights`: those whose models lend layers."""
        self._clock = clock
        self._capacity_bytes = capacity_bytes
        self._weights = weights
        self._host_capacity_bytes = host_bytes
        self._in, self._out = Wire(), Wire()
        self._moving: list[SequenceKv] = []
        self.used_bytes = 0
        self.host_used_bytes = 0
        self.swapped_out_total = 0
        self.swapped_in_total = 0

    @property
    def spare_bytes(self) -> int:
        """What its own memory and the layers that are lent have beyond what is used: negative while KV lies in layers
        whose model has left.
        """
        return self._capacity_bytes + self._weights.lent_bytes - self.used_bytes

    @property
    def free_bytes(self) -> int:
        """What can be given out now."""
        spare_bytes = self._capacity_bytes + self._weights.lent_bytes - self.used_bytes
        return spare_bytes if spare_bytes > 0 else 0

    @property
    def strayed_bytes(self) -> int:
        """What lies in layers, lent or not."""
        return max(self.used_bytes - self._capacity_bytes, 0)

    @property
    def swap_out_wait_s(self) -> float:
        """How long KV sent out now would wait for what is on its way out."""
        return self._out.waits_s(self._clock())

    @property
    def freeing(self) -> bool:
        """Whether something is on its way out, so that there is more room soon."""
        return KvLocation.SWAPPING_OUT in [kv.location for kv in self._moving]

    @property
    def next_move_s(self) -> float | None:
        """When the next transfer is over; None when there is none."""
        return min([kv.moved_s for kv in self._moving]) if self._moving else None

    def lacks_bytes(self, kv: SequenceKv, tokens: int) -> int:
        """By what there is too little room for the KV of so many tokens, or for what is in host memory."""
        wanted_bytes = kv.moved_bytes if kv.location is KvLocation.HOST else tokens * kv.bytes_per_token
        return max(wanted_bytes - kv.here_bytes - self._spare_bytes_of(kv), 0)

    def host_fits(self, kv: SequenceKv, tokens: int) -> bool:
        """Whether host memory has room for the KV of so many tokens."""
        return tokens * kv.bytes_per_token <= self._host_capacity_bytes - self.host_used_bytes

    def fits(self, kv: SequenceKv, *, spare: int) -> bool:
        """Whether KV in host memory has room on the slot beside `spare` more of its tokens."""
        return kv.moved_bytes + spare * kv.bytes_per_token <= self._spare_bytes_of(kv)

    def grow(self, kv: SequenceKv, tokens: int) -> bool:
        """Room for `tokens` tokens of KV that is on the device or nowhere yet; False when there is too little."""
        more_bytes = tokens * kv.bytes_per_token - kv.here_bytes
        if more_bytes > 0:
            if more_bytes > self._spare_bytes_of(kv):
                return False
            self._take(kv, more_bytes)
        kv.location = KvLocation.DEVICE
        return True

    def grow_unseen(self, size_bytes: int) -> None:
        """Room for KV, of which there is enough, whose owner writes down later which sequences took it."""
        self.used_bytes += size_bytes
        assert self.spare_bytes >= 0

    def swap_out(self, kv: SequenceKv, tokens: int) -> bool:
        """Send the KV of `tokens` tokens to host memory; False when that is full."""
        assert kv.location is KvLocation.DEVICE
        if not self.host_fits(kv, tokens):
            return False
        size_bytes = tokens * kv.bytes_per_token
        self._take(kv, size_bytes - kv.here_bytes)
        self.host_used_bytes += size_bytes
        kv.host_bytes = size_bytes
        kv.moved_tokens = tokens
        self._move(kv, KvLocation.SWAPPING_OUT, self._out)
        self.swapped_out_total += 1
        return True

    def swap_in(self, kv: SequenceKv) -> bool:
        """Send for KV in host memory; False when there is no room."""
        assert kv.location is KvLocation.HOST
        size_bytes = kv.moved_bytes
        if size_bytes > self._spare_bytes_of(kv):
            return False
        self._take(kv, size_bytes)
        self._move(kv, KvLocation.SWAPPING_IN, self._in)
        self.swapped_in_total += 1
        return True

    def adopt(self, kv: SequenceKv, handle: KvHandle) -> bool:
        """Take note of KV that another slot keeps in its host memory; False when that cannot be read."""
        assert kv.location is KvLocation.NONE
        if handle.file != REPLAY_KV_FILE:
            return False
        kv.location, kv.moved_tokens = KvLocation.HOST, handle.tokens
        return True

    def handle(self, kv: SequenceKv, tokens: int) -> KvHandle:
        """Where another slot finds KV in host memory."""
        assert kv.location is KvLocation.HOST
        return KvHandle(file=REPLAY_KV_FILE, slab_bytes=0, shape=(0, 0, 0, 0, 0), blocks=(), tokens=tokens)

    def drop(self, kv: SequenceKv) -> None:
        """Forget KV, wherever it is."""
        if kv.location is KvLocation.NONE:
            return
        if kv.location in _MOVING:
            self._moving.remove(kv)
        self._leave(kv)
        self._leave_host(kv)
        kv.location = KvLocation.NONE

    def settle(self) -> None:
        """Take note of the transfers that are over."""
        if not self._moving:
            return
        now_s = self._clock()
        for kv in [kv for kv in self._moving if kv.moved_s <= now_s]:
            self._moving.remove(kv)
            if kv.location is KvLocation.SWAPPING_OUT:
                self._leave(kv)
                kv.location = KvLocation.HOST
            else:
                self._leave_host(kv)
                kv.location = KvLocation.DEVICE

    def _move(self, kv: SequenceKv, location: KvLocation, wire: Wire) -> None:
        kv.location = location
        kv.moved_s = wire.send(kv.moved_bytes / kv.bytes_per_s, self._clock())
        self._moving.append(kv)

    def _spare_bytes_of(self, kv: SequenceKv) -> int:
        """What this KV could take more; negative while there is too little for what lies there."""
        share = kv.share
        return self.spare_bytes if share is None else min(self.spare_bytes, share.capacity_bytes - share.used_bytes)

    def _take(self, kv: SequenceKv, more_bytes: int) -> None:
        """Let KV take so much more of the slot's memory."""
        self.used_bytes += more_bytes
        kv.here_bytes += more_bytes
        if kv.share is not None:
            kv.share.used_bytes += more_bytes

    def _leave(self, kv: SequenceKv) -> None:
        self._take(kv, -kv.here_bytes)

    def _leave_host(self, kv: SequenceKv) -> None:
        self.host_used_bytes -= kv.host_bytes
        kv.host_bytes = 0
