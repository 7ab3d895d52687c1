"""The requests of a slot from `add` to their last output, as every engine keeps them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from dataplane.engine import EngineOutput, EngineRequest, KvHandle
from dataplane.errors import BadRequestError
from dataplane.turns.prefill import PrefillQueue

KvT = TypeVar("KvT")
KvT_co = TypeVar("KvT_co", covariant=True)


class Tracked(Protocol[KvT_co]):
    """A request on its way, and its KV."""

    @property
    def request(self) -> EngineRequest:
        """What was asked."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def kv(self) -> KvT_co:
        """Its KV, wherever that is."""


SequenceT = TypeVar("SequenceT", bound=Tracked[object])


class RequestTable(ABC, Generic[SequenceT, KvT]):
    """Those that run or wait; those handed over whose KV waits to be read; ends that are still to be told."""

    def __init__(self) -> None:
        self.prefills = PrefillQueue()
        self._sequences: dict[str, SequenceT] = {}
        self._handed_over: dict[str, KvT] = {}
        self._ended: dict[str, EngineOutput] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        """Requests running or waiting, and ends still to be told."""
        return len(self._sequences) + len(self._ended)

    def __iter__(self) -> Iterator[SequenceT]:
        """Those that run or wait."""
        return iter(self._sequences.values())

    @abstractmethod
    def kv_of(self, sequence: SequenceT) -> KvT:
        """The sequence's KV."""

    @abstractmethod
    def drop_kv(self, kv: KvT) -> None:
        """Free KV, wherever it is."""

    @abstractmethod
    def leave_model(self, sequence: SequenceT) -> None:
        """Take a sequence out of its model's list of those that have begun, if it is there."""

    @property
    def all_kv(self) -> list[KvT]:
        """Of those that run or wait, and of those that were handed over and not released."""
        return [*map(self.kv_of, self), *self._handed_over.values()]

    def find(self, request_ids: Iterable[str]) -> list[SequenceT]:
        """Requests by their ids, in that order."""
        return [self._sequences[request_id] for request_id in request_ids]

    def of_instance(self, instance_id: str) -> list[SequenceT]:
        """Those of one instance that run or wait."""
        return [sequence for sequence in self if sequence.request.instance_id == instance_id]

    def waiting_of(self, model: str) -> bool:
        """Whether requests of a model wait for their prefill."""
        return any(group.model == model for group in self.prefills.groups)

    def is_over(self, request: EngineRequest) -> bool:
        """Whether a new request has all its tokens already; its end is then told.

        Raises:
            BadRequestError: its id is in use.
        """
        request_id = request.request_id
        if request_id in self._sequences or request_id in self._ended:
            raise BadRequestError(f"request id {request_id} is in use", param="request_id")
        if len(request.generated) < request.max_tokens:
            return False
        self._ended[request_id] = EngineOutput(request_id=request_id, finish_reason="length")
        return True

    def next_order(self) -> int:
        """The place of a new request in the order of arrival."""
        self._arrivals += 1
        return self._arrivals

    def forget(self, request_id: str) -> None:
        """Take a request out and free its KV. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.prefills = self.prefills.remove(request_id)
            self.leave_model(sequence)
            self.drop_kv(self.kv_of(sequence))

    def cancel(self, request_id: str) -> None:
        """Drop a request and free what it holds; nothing more is heard of it."""
        self._ended.pop(request_id, None)
        self.forget(request_id)
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """Free the KV of a request that was handed over. Unknown ids are ignored."""
        kv = self._handed_over.pop(request_id, None)
        if kv is not None:
            self.drop_kv(kv)

    def end_all(self, sequences: Iterable[SequenceT], error: str) -> None:
        """End requests with an error."""
        for sequence in list(sequences):
            request_id = sequence.request.request_id
            self.forget(request_id)
            self._ended[request_id] = EngineOutput(request_id=request_id, error=error)

    def let_go(self, sequence: SequenceT, handle: KvHandle) -> None:
        """Hand a request over: it leaves, and its KV stays until `release`."""
        request_id = sequence.request.request_id
        self._ended[request_id] = EngineOutput(request_id=request_id, kv=handle)
        self._handed_over[request_id] = self.kv_of(sequence)
        self.leave_model(sequence)
        del self._sequences[request_id]

    def tell_ended(self) -> list[EngineOutput]:
        """Last outputs that come out of no step."""
        outputs = list(self._ended.values())
        self._ended.clear()
        return outputs
