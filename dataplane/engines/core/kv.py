"""The KV of sequences as every engine sees it: where it is, and what can be asked of the memory that keeps it."""

from enum import Enum
from typing import Protocol, TypeVar

from dataplane.engines.interface import KvHandle


class Place(Enum):
    """Where the KV of a sequence is. LEAVING and ARRIVING take room on both sides."""

    NOWHERE = "nowhere"
    HERE = "here"
    LEAVING = "leaving"
    AWAY = "away"
    ARRIVING = "arriving"


class Kv(Protocol):
    """The KV of one sequence."""

    @property
    def place(self) -> Place:
        """Where it is."""

    @property
    def size_bytes(self) -> int:
        """What it takes, on the side where it takes more."""


KvT = TypeVar("KvT", bound=Kv)
KvT_contra = TypeVar("KvT_contra", bound=Kv, contravariant=True)


class KvMemory(Protocol[KvT_contra]):
    """KV of a slot and of its host memory, and the transfers between them."""

    @property
    def leaving(self) -> bool:
        """Whether something is on its way out, so that there is more room soon."""

    @property
    def swapped_out_total(self) -> int:
        """Transfers to host memory since the start."""

    @property
    def swapped_in_total(self) -> int:
        """Transfers from host memory since the start."""

    def grow(self, kv: KvT_contra, tokens: int) -> bool:
        """Room for `tokens` tokens of KV that is HERE or NOWHERE; it is HERE then. False when there is too little."""

    def fits(self, kv: KvT_contra, *, spare: int) -> bool:
        """Whether KV that is AWAY has room on the slot beside `spare` more of its blocks."""

    def swap_out(self, kv: KvT_contra, tokens: int) -> bool:
        """Send the KV of the first `tokens` tokens, which is HERE, to host memory; False when that is full."""

    def swap_in(self, kv: KvT_contra) -> bool:
        """Send for KV that is AWAY; False when there is no room."""

    def drop(self, kv: KvT_contra) -> None:
        """Forget KV, wherever it is; it is NOWHERE then."""

    def adopt(self, kv: KvT_contra, handle: KvHandle) -> bool:
        """Take the KV that another slot left; it is AWAY then. False when it cannot be read."""

    def handle(self, kv: KvT_contra, tokens: int) -> KvHandle:
        """Where another slot finds the first `tokens` tokens of KV that is AWAY."""
