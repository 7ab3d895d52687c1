"""Where the KV of a sequence is, and whose makes way when memory is short. The rules of every engine."""

from collections.abc import Iterable
from enum import Enum
from typing import Protocol, TypeVar


class Place(Enum):
    """Where the KV of a sequence is. LEAVING and ARRIVING take room on both sides."""

    NOWHERE = "nowhere"
    HERE = "here"
    LEAVING = "leaving"
    AWAY = "away"
    ARRIVING = "arriving"


class Ranked(Protocol):
    """A sequence of some model. `key`: its place in the order of service; the smaller goes first."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the order of service."""


SequenceT = TypeVar("SequenceT", bound=Ranked)


def choose_victim(here: Iterable[SequenceT], requester: SequenceT, keep: Iterable[SequenceT] = ()) -> SequenceT | None:
    """Whose KV leaves so that the requester's may grow or come in: of other models' sequences the last in the order of
    service, else the last of its own model's that come after it. None: nobody has to make way for it.
    """
    kept = {id(sequence) for sequence in keep} | {id(requester)}
    candidates = (
        sequence
        for sequence in here
        if id(sequence) not in kept and (sequence.model != requester.model or sequence.key > requester.key)
    )
    return max(candidates, key=lambda sequence: (sequence.model != requester.model, sequence.key), default=None)
