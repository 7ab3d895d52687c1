"""A slot of a fleet that is a pool's: the live engine, and its pooled instances as servers of the world.

    PooledServer a --+
    PooledServer b --+-- PoolSlot: one slot that does both kinds of work, whose models come and go
    PooledServer c --+

An instance is one model's share of the slot; it is opened, closed and lost as one with GPUs of its own is.
"""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from controlplane.policies.facts import Endpoint, InstanceFacts
from dataplane.engines.replay.engine import ReplaySettings
from dataplane.protocol.messages import ModelSpec
from dataplane.protocol.tiers import InstanceKind
from ops.simulator.kernel.answers import AnswersByModel
from ops.simulator.kernel.events import Events
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.pool import PoolServer


class PoolSlot:
    """One slot of so many GPUs. `ended` is called for each request with its last token."""

    def __init__(
        self,
        node_id: str,
        number: int,
        region: str,
        settings: ReplaySettings,
        *,
        gpus: int = 1,
        events: Events,
        answers: AnswersByModel,
        ended: Callable[[Served], None],
    ) -> None:
        self.place = (node_id, number)
        self.region = region
        self.server = PoolServer(
            f"{node_id}/{number}",
            region,
            ["both"],
            (),
            settings,
            gpus=gpus,
            events=events,
            answers=answers,
            ended=self._request_ended,
        )
        self._ended = ended
        self._instances: dict[str, PooledServer] = {}

    def has(self, model: str) -> bool:
        return model in self._instances

    def add(self, instance_id: str, model: ModelSpec, node_load: Callable[[], float]) -> "PooledServer":
        """Add an instance of a model that has none here; it serves once it is opened."""
        assert not self.has(model.name)
        self._instances[model.name] = instance = PooledServer(instance_id, self, model, node_load)
        return instance

    def remove(self, model: str) -> None:
        """Remove an instance without requests."""
        del self._instances[model]
        if self.server.has(model):
            self.server.unload(model)

    def _request_ended(self, served: Served) -> None:
        self._ended(served)
        self._instances[served.request.model].settle()


class PooledServer:
    """A pooled instance. Meets `presence.Server`; what its slot works is the slot's own. `node_load`: of the busiest
    slot of its node. `pooled`: until it gets the GPUs of its slot.
    """

    slots = 1
    switches = 0
    busy_s = 0.0

    def __init__(self, instance_id: str, slot: PoolSlot, model: ModelSpec, node_load: Callable[[], float]) -> None:
        self.accepting = False
        self.pooled = True
        self.kind = InstanceKind.MIXED
        self.instance_id = instance_id
        self.endpoint = Endpoint(model=model.name, region=slot.region)
        self._slot = slot
        self._model = model
        self._node_load = node_load
        self._emptied: Callable[[], None] | None = None

    @property
    def remaining_tokens(self) -> int:
        server, name = self._slot.server, self._model.name
        return server.left_tokens(name) if server.has(name) else 0

    def fits(self, request: Request) -> bool:
        return self._slot.server.fits(request)

    def submit(self, served: Served) -> None:
        assert self.accepting
        self._slot.server.submit(served)

    def reports(self, model: str | None = None) -> Iterable[InstanceFacts]:
        """The report of the instance; KV is that of the whole slot."""
        node_id, number = self._slot.place
        if not self._slot.server.has(self._model.name):
            return
        for facts in self._slot.server.reports(self._model.name):
            yield replace(
                facts,
                instance_id=self.instance_id,
                node_id=node_id,
                slot=number,
                accepting=self.accepting,
                kind=self.kind,
                load=self._node_load(),
                pooled=self.pooled,
            )

    def open(self, kind: InstanceKind) -> None:
        """Accept requests."""
        self.accepting, self.kind, self._emptied = True, kind, None
        if not self._slot.server.has(self._model.name):
            self._slot.server.load(self._model)

    def close(self, emptied: Callable[[], None]) -> None:
        """Accept no more requests; call `emptied` when the last one has ended, or at once."""
        self.accepting, self._emptied = False, emptied
        self.settle()

    def lose(self) -> list[Served]:
        """Lose the instance and its slot; returns its requests."""
        self.accepting, self._emptied = False, None
        return self._slot.server.lose(self._model.name)

    def leave(self) -> None:
        self._slot.remove(self._model.name)

    def settle(self) -> None:
        """Call `emptied` if it is closed and empty."""
        if self._emptied is not None and not self._slot.server.inside(self._model.name):
            emptied, self._emptied = self._emptied, None
            emptied()
