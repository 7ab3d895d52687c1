"""The requests in flight on a slot: what was asked, what came so far, and who waits for the rest."""

import asyncio
from dataclasses import dataclass, field, replace

from dataplane.engine import EngineOutput, EngineRequest
from dataplane.errors import BadRequestError, DataplaneError, WorkerLostError


@dataclass(kw_only=True)
class Flight:
    """A request between its admission and its last output. `outputs` ends with an error or a finish reason.

    `made` are the tokens of this slot's workers so far, `losses` how many workers died on it.
    """

    request: EngineRequest
    outputs: "asyncio.Queue[EngineOutput | DataplaneError]" = field(default_factory=asyncio.Queue)
    made: list[int] = field(default_factory=list)
    losses: int = 0

    def continued(self) -> EngineRequest:
        """The request as another worker must get it."""
        return replace(self.request, generated=self.request.generated + tuple(self.made))


class Flights:
    """All flights of a slot, by request id. Ending one takes it out, so that nothing follows its last output."""

    def __init__(self, losses_max: int) -> None:
        self._losses_max = losses_max
        self._flights: dict[str, Flight] = {}

    def __len__(self) -> int:
        """How many are in flight."""
        return len(self._flights)

    def open(self, request: EngineRequest) -> Flight:
        """Note a new request.

        Raises:
            dataplane.errors.BadRequestError: its id is in flight already.
        """
        if request.request_id in self._flights:
            raise BadRequestError(f"request {request.request_id} is in flight already", param="request_id")
        flight = Flight(request=request)
        self._flights[request.request_id] = flight
        return flight

    def of_instance(self, instance_id: str) -> list[Flight]:
        """The flights of one instance, oldest first."""
        return [flight for flight in self._flights.values() if flight.request.instance_id == instance_id]

    def hear(self, output: EngineOutput) -> None:
        """Pass an engine's output on. Those of requests that were cancelled meanwhile are dropped."""
        flight = self._flights.get(output.request_id)
        if flight is None:
            return
        flight.made.extend(output.token_ids)
        flight.outputs.put_nowait(output)
        if output.finish_reason is not None or output.error is not None:
            del self._flights[output.request_id]

    def end(self, request_id: str, error: DataplaneError) -> None:
        """End a flight with an error. Unknown ids are ignored."""
        flight = self._flights.pop(request_id, None)
        if flight is not None:
            flight.outputs.put_nowait(error)

    def end_instance(self, instance_id: str, error: DataplaneError) -> None:
        """End all flights of an instance."""
        for flight in self.of_instance(instance_id):
            self.end(flight.request.request_id, error)

    def end_all(self, error: DataplaneError) -> None:
        """End all flights."""
        for request_id in list(self._flights):
            self.end(request_id, error)

    def drop(self, request_id: str) -> bool:
        """Forget a flight whose client is gone; whether there was one."""
        return self._flights.pop(request_id, None) is not None

    def lose_worker(self) -> None:
        """Count a lost worker on each flight, and end those that lost too many: one of them may be the cause."""
        for flight in list(self._flights.values()):
            flight.losses += 1
            if flight.losses > self._losses_max:
                error = WorkerLostError(f"{flight.losses} workers were lost while they ran this request")
                self.end(flight.request.request_id, error)
