"""The KV cache of sequences as every engine sees it: its location, and the operations of the memory that keeps it."""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Generic, Literal, Protocol, TypeVar

from dataplane.engines.interface import KvHandle

KvEvents = Literal["device", "host", "off"]
"""How a decode slot waits for KV that a prefill slot still transfers: its device waits for the prefill slot's one, or a
thread of the host for a word in shared memory; "off": the KV is announced when it has been transferred.
"""


class KvLocation(Enum):
    """Where the KV of a sequence is. During a swap it takes memory on both sides."""

    NONE = "none"
    DEVICE = "device"
    SWAPPING_OUT = "swapping out"
    HOST = "host"
    SWAPPING_IN = "swapping in"


NONE, DEVICE, SWAPPING_OUT, HOST, SWAPPING_IN = KvLocation
"""Names of their own: looking up a member of an enumeration takes longer than most of what is done with it."""


class Kv(Protocol):
    """The KV of one sequence."""

    @property
    def location(self) -> KvLocation: ...

    @property
    def size_bytes(self) -> int:
        """Its memory, on the side where it takes more."""


KvT = TypeVar("KvT", bound=Kv)
KvT_contra = TypeVar("KvT_contra", bound=Kv, contravariant=True)


class KvMemory(Protocol[KvT_contra]):
    """The KV memory of a slot and of its host, and the transfers between them. Totals count from the start."""

    @property
    def freeing(self) -> bool:
        """Whether a transfer is under way that will free device memory."""

    @property
    def evicting(self) -> bool:
        """Whether such a transfer copies cached prefixes, so that no request must make room meanwhile."""

    @property
    def swapped_out_total(self) -> int: ...

    @property
    def swapped_in_total(self) -> int: ...

    def grow(self, kv: KvT_contra, tokens: int) -> bool:
        """Allocate memory for `tokens` tokens of KV whose location is DEVICE or NONE, which becomes DEVICE; False if
        free memory is too small. KV that was nowhere takes over its longest cached prefix (`reused_tokens`); if some of
        that is in host memory, it is SWAPPING_IN. Cached prefixes that nobody uses count as free memory.
        """

    def fits(self, kv: KvT_contra, *, spare: int) -> bool:
        """Whether the device has memory for KV that is on the HOST, and for `spare` more of its blocks."""

    def swap_s(self, kvs: Iterable[KvT_contra]) -> float:
        """Estimated seconds to swap other KV out, and then this KV, which is on the HOST, in; if it is more than the
        device has memory for, of as much as that.
        """

    def swap_out(self, kv: KvT_contra, tokens: int) -> bool:
        """Transfer the KV of the first `tokens` tokens from the DEVICE to host memory; False if that is full."""

    def swap_in(self, kv: KvT_contra) -> bool:
        """Transfer KV from the HOST to the device; False if free memory is too small."""

    def drop(self, kv: KvT_contra) -> None:
        """Free KV at any location; its location is NONE then."""

    def adopt(self, kv: KvT_contra, handle: KvHandle) -> bool:
        """Take over KV in the host memory of another slot; its location is HOST then. False if it cannot be read."""

    def can_export(self, kv: KvT_contra) -> bool:
        """Whether other slots can be told of the KV: it is on the HOST, or SWAPPING_OUT and they can wait for it."""

    def handle(self, kv: KvT_contra, tokens: int) -> KvHandle:
        """How another slot reads the first `tokens` tokens of KV that can be exported."""

    def track(self, kv: KvT_contra, tokens: Sequence[int], salt: str) -> None:
        """Let KV share prefixes with KV of the same model and salt. `tokens`: those of its sequence, which may grow."""

    def reused_tokens(self, kv: KvT_contra) -> int:
        """Tokens whose KV was taken over from the cache when its memory was allocated."""

    def awaited(self, kv: KvT_contra) -> Kv | None:
        """The KV of another sequence whose prefill computes most of what this one, which has not begun, would compute,
        and not much else; None if there is none.
        """

    def computed(self, kv: KvT_contra, tokens: int) -> None:
        """Cache the full blocks of the first `tokens` tokens, whose KV is on the DEVICE and final."""

    def bytes_of(self, kvs: Iterable[KvT_contra]) -> int:
        """The memory of some KV, each on the side where it takes more; shared blocks count once."""


class WithoutPrefixCache(Generic[KvT]):
    """The part of `KvMemory` about cached prefixes, for memory that caches none."""

    evicting = False

    def track(self, kv: KvT, tokens: Sequence[int], salt: str) -> None:
        """See `KvMemory`."""

    def reused_tokens(self, kv: KvT) -> int:
        return 0

    def awaited(self, kv: KvT) -> Kv | None:
        return None

    def computed(self, kv: KvT, tokens: int) -> None:
        """See `KvMemory`."""

    def bytes_of(self, kvs: Iterable[KvT]) -> int:
        return sum([kv.size_bytes for kv in kvs])
