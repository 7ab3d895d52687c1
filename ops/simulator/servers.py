"""A dedicated instance as a server of the world: one model in a slot of its own."""

from collections.abc import Callable, Iterable

from controlplane.policies.facts import Endpoint, InstanceFacts, InstanceKind
from ops.simulator.costs import InstanceSettings, ModelCosts
from ops.simulator.dedicated import Instance
from ops.simulator.events import Events
from ops.simulator.requests import Request, Served


class DedicatedServer:
    """One instance. Meets `world.Server`. `ended` is told of each request when its last token is out.

    A server that closes takes no more requests and says when the last one is out; one that is lost answers no more.
    """

    slots = 1
    switches = 0

    def __init__(
        self,
        instance_id: str,
        region: str,
        costs: ModelCosts,
        settings: InstanceSettings,
        *,
        gpu_type: str,
        events: Events,
        ended: Callable[[Served], None],
        node_id: str | None = None,
        slot: int = 0,
        kind: InstanceKind = InstanceKind.MIXED,
    ) -> None:
        self.accepting = True
        self.kind = kind
        self.instance_id = instance_id
        self.endpoint = Endpoint(model=costs.name, region=region)
        self._place = (node_id or instance_id, slot)
        self._gpu_type = gpu_type
        self._instance = Instance(costs, settings, events, self._over)
        self._ended = ended
        self._emptied: Callable[[], None] | None = None
        self._flights: dict[int, Served] = {}
        self._lost_busy_s: float | None = None

    @property
    def busy_s(self) -> float:
        """For how long it has worked."""
        return self._instance.busy_s if self._lost_busy_s is None else self._lost_busy_s

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens and tokens to make, as of its last event."""
        return self._instance.remaining_tokens

    def fits(self, request: Request) -> bool:
        """Whether its KV memory could hold the request."""
        return self._instance.fits(request)

    def submit(self, served: Served) -> None:
        """Take in a request."""
        assert self.accepting
        self._flights[served.request.number] = served
        self._instance.submit(served)

    def reports(self, model: str | None = None) -> Iterable[InstanceFacts]:
        """The instance as of its last event."""
        instance = self._instance
        token_bytes = instance.model.kv_bytes_per_token
        yield InstanceFacts(
            instance_id=self.instance_id,
            node_id=self._place[0],
            slot=self._place[1],
            endpoint=self.endpoint,
            gpu_type=self._gpu_type,
            accepting=self.accepting,
            age_s=0.0,
            kv_used_bytes=instance.kv_tokens * token_bytes,
            kv_capacity_bytes=instance.kv_tokens_max * token_bytes,
            remaining_tokens=instance.remaining_tokens,
            kv_bytes_per_token=token_bytes,
            kind=self.kind,
            prefill_wait_s=instance.prefill_wait_s,
            prefill_urgent_wait_s=instance.prefill_wait_s,
            prefill_token_s=instance.model.latency.prefill_per_token_s,
        )

    def open(self, kind: InstanceKind) -> None:
        """Take requests, again or for the first time."""
        self.accepting, self.kind, self._emptied = True, kind, None

    def close(self, emptied: Callable[[], None]) -> None:
        """Take no more; `emptied` is called when the last one is out, at once where there is none."""
        self.accepting, self._emptied = False, emptied
        if not self._flights:
            emptied()

    def lose(self) -> list[Served]:
        """Be gone with all it has; returns that."""
        self.accepting, self._emptied, self._lost_busy_s = False, None, self._instance.busy_s
        flights, self._flights = list(self._flights.values()), {}
        return flights

    def _over(self, served: Served) -> None:
        if self._flights.pop(served.request.number, None) is None:
            return  # of a node that is gone
        self._ended(served)
        if self._emptied is not None and not self._flights:
            self._emptied()
