"""A dedicated instance as a server of the world: one model in a slot of its own."""

from collections.abc import Iterable

from controlplane.policies.facts import Endpoint, InstanceFacts, InstanceKind
from ops.simulator.dedicated import Instance
from ops.simulator.requests import Request, Served


class DedicatedServer:
    """One instance. Meets `world.Server`."""

    slots = 1
    switches = 0

    def __init__(
        self, instance_id: str, region: str, instance: Instance, gpu_type: str, kind: InstanceKind = InstanceKind.MIXED
    ) -> None:
        self._instance = instance
        self._id = instance_id
        self._endpoint = Endpoint(model=instance.model.name, region=region)
        self._gpu_type = gpu_type
        self._kind = kind

    @property
    def busy_s(self) -> float:
        """For how long it has worked."""
        return self._instance.busy_s

    def fits(self, request: Request) -> bool:
        """Whether its KV memory could hold the request."""
        return self._instance.fits(request)

    def submit(self, served: Served) -> None:
        """Take in a request."""
        self._instance.submit(served)

    def reports(self) -> Iterable[InstanceFacts]:
        """The instance as of its last event."""
        instance = self._instance
        token_bytes = instance.model.kv_bytes_per_token
        yield InstanceFacts(
            instance_id=self._id,
            node_id=self._id,
            endpoint=self._endpoint,
            gpu_type=self._gpu_type,
            accepting=True,
            age_s=0.0,
            kv_used_bytes=instance.kv_tokens * token_bytes,
            kv_capacity_bytes=instance.kv_tokens_max * token_bytes,
            remaining_tokens=instance.remaining_tokens,
            kv_bytes_per_token=token_bytes,
            kind=self._kind,
            prefill_wait_s=instance.prefill_wait_s,
            prefill_urgent_wait_s=instance.prefill_wait_s,
            prefill_token_s=instance.model.latency.prefill_per_token_s,
        )
