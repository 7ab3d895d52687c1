"""A node: follows its desired instances, and admits requests to them.

What the control plane calls a slot of the node is one of its pools: the place of an instance is a pool's number.
"""

import asyncio
import time
from weakref import WeakValueDictionary

import msgspec
from prometheus_client import CollectorRegistry

from dataplane.agent.answers import Answer, check_sampling, engine_request
from dataplane.agent.fences import Fences
from dataplane.agent.host_files import HostFiles
from dataplane.agent.measures import RequestMeasure, RequestMeasures
from dataplane.agent.requests import InflightRequest
from dataplane.agent.settings import AgentSettings
from dataplane.agent.tokenization import Text, TextStream
from dataplane.agent.tokenizing import Tokenizing
from dataplane.agent.worker_groups import Pool
from dataplane.protocol.errors import (
    BadRequestError,
    StaleEpochError,
    StaleGenerationError,
    UnknownInstanceError,
    WorkerLostError,
)
from dataplane.protocol.messages import DesiredInstance, DesiredInstances, Generate, Heartbeat, InstanceReport

_LOOK_AGAIN_S = 0.05


class Agent:
    """One node. Everything happens on one event loop; `changed` is set when the control plane should hear of it."""

    def __init__(self, settings: AgentSettings, boot_id: str) -> None:
        self.settings = settings
        self.boot_id = boot_id
        self.changed = asyncio.Event()
        self.registry = CollectorRegistry()
        self._measures = RequestMeasures(self.registry)
        self._generation = 0
        self._leaving = self._closing = self._handing_over = False
        self._fences = Fences(settings.fences_max)
        self._tokenizing = Tokenizing(settings)
        self._misplaced: tuple[DesiredInstance, ...] = ()
        self._desired: dict[str, DesiredInstance] = {}
        self._files = HostFiles(settings, boot_id)
        texts: WeakValueDictionary[str, Text] = WeakValueDictionary()
        self.pools = tuple(
            Pool(indices, settings, self._files, texts, on_change=self.changed.set) for indices in settings.pools()
        )
        slots = (slot for pool in self.pools for slot in pool.slots)
        self.slots = tuple(sorted(slots, key=lambda slot: slot.index))

    @property
    def generation(self) -> int:
        """The desired state this node follows; 0 before it heard of any."""
        return self._generation

    @property
    def host_bytes(self) -> int:
        """Host memory for models: what the settings give, or less where the file system is smaller."""
        return self._files.cache_bytes

    async def run(self) -> None:
        """Keep every slot's worker running until cancelled; then end them."""
        self._files.open()
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self.slots:
                    group.create_task(slot.run())
        finally:
            for pool in self.pools:
                pool.end_all(WorkerLostError("the agent is shutting down"))
            self._files.close()

    def apply(self, desired: DesiredInstances) -> None:
        """Follow a desired state.

        Raises:
            StaleGenerationError: this node follows a newer one.
        """
        if desired.generation < self._generation:
            raise StaleGenerationError(
                f"generation {desired.generation} is older than {self._generation}, which this node follows",
                param="generation",
            )
        self._generation = desired.generation
        self._handing_over = desired.handing_over
        self._desired = {instance.instance_id: instance for instance in desired.instances}
        for number, pool in enumerate(self.pools):
            pool.follow(instance for instance in desired.instances if instance.slot == number)
        self._misplaced = tuple(i for i in desired.instances if not 0 <= i.slot < len(self.pools))

    async def hand_over(self, *, decided_s: float, max_s: float) -> None:
        """Ask for successors of all instances on other nodes, and serve until they have taken over.

        Returns when nothing is held here any more, when the control plane has started no successor within `decided_s`
        seconds, or after `max_s` seconds. From then on every instance is reported as draining.
        """
        self._leaving = True
        self.changed.set()
        started_s = time.monotonic()
        while self._desired and (waited_s := time.monotonic() - started_s) < max_s:
            if waited_s >= decided_s and not self._handing_over:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        self._closing = True
        self.changed.set()

    def forget_generation(self) -> None:
        """Take any generation next: the control plane does not know this node, so its count starts anew."""
        self._generation = 0

    def reports(self) -> tuple[InstanceReport, ...]:
        """All instances of the node."""
        misplaced = [
            InstanceReport(
                instance_id=instance.instance_id,
                model=instance.model.name,
                slot=instance.slot,
                state="failed",
                error=f"slot {instance.slot} does not exist; this node has {len(self.pools)}",
            )
            for instance in self._misplaced
        ]
        return (*(self._marked(pool, report) for pool in self.pools for report in pool.reports()), *misplaced)

    def _marked(self, pool: Pool, report: InstanceReport) -> InstanceReport:
        """A pool's report with what only the desired state knows. To its pool a spot instance is a ready one."""
        desired = self._desired[report.instance_id]
        state = report.state
        if desired.spot and state == "ready":
            left = desired.lease_id is None and pool.in_use(report.instance_id)
            state = "draining" if left else "spot"
        if self._closing and state == "ready":
            state = "draining"
        return msgspec.structs.replace(report, state=state, kind=desired.kind)

    def heartbeat(self) -> Heartbeat:
        """What the control plane is told each second."""
        return Heartbeat(
            node=self.settings.node,
            boot_id=self.boot_id,
            generation=self._generation,
            instances=self.reports(),
            switches_total=self.switches_total,
            load=max((slot.load for slot in self.slots if slot.kind != "prefill"), default=0.0),
            leaving=self._leaving,
        )

    @property
    def switches_total(self) -> int:
        """Model switches on all slots since the agent started."""
        return sum(slot.switches_total for slot in self.slots)

    async def admit(self, generate: Generate) -> Answer:
        """Check and tokenize a request, and send it to its instance.

        Raises:
            DataplaneError: the refusal; its class says why.
        """
        check_sampling(generate, stop_strings_max=self.settings.stop_strings_max)
        self._check_lease(generate)
        self._fences.enter(generate.fence, generate.epoch)
        pool = self._pool_of(generate.instance_id)
        hosted = pool.ready_instance(generate.instance_id)
        model = hosted.desired.model
        if generate.model != model.name:
            raise BadRequestError(
                f"instance {generate.instance_id} runs {model.name}, not {generate.model}", param="model"
            )
        pool.check_queue()
        assert hosted.text is not None, "an instance is ready only with its tokenizer"
        tokens_max = min(model.context_tokens, pool.kv_tokens_max(generate.instance_id))
        prompt = await self._tokenizing.tokenize(generate, hosted.text, tokens_max=tokens_max)
        text = TextStream(hosted.text, generate.sampling.stop, sent_chars=generate.sent_chars)
        resumed = await asyncio.to_thread(text.resume, generate.generated) if generate.generated else ""
        pool.check_queue()
        request = engine_request(generate, prompt, model, tokens_max=tokens_max)
        inflight = self._fenced(generate, pool, pool.submit(request))
        measure = RequestMeasure(self._measures, model.name, len(prompt), time.monotonic)
        return Answer(inflight, text, cancel=pool.cancel, measure=measure, resumed=resumed)

    def _fenced(self, generate: Generate, pool: Pool, inflight: InflightRequest) -> InflightRequest:
        """The request in flight, unless a newer claim of its request came while it was tokenized."""

        def cancel(inflight: InflightRequest) -> None:
            pool.cancel(inflight.request)

        try:
            self._fences.run(generate.fence, generate.epoch, inflight, cancel)
        except StaleEpochError:
            cancel(inflight)
            raise
        return inflight

    def _check_lease(self, generate: Generate) -> None:
        """A spot instance is its lessee's alone, and only as long as the lease lasts."""
        desired = self._desired.get(generate.instance_id)
        if desired is None or (generate.lease_id is None and not desired.spot):
            return
        if generate.lease_id is None:
            raise UnknownInstanceError(f"instance {generate.instance_id} is lent out", param="instance_id")
        if generate.lease_id != desired.lease_id:
            raise UnknownInstanceError(
                f"the lease of instance {generate.instance_id} has ended or is another's", param="lease_id"
            )

    def _pool_of(self, instance_id: str) -> Pool:
        for pool in self.pools:
            if pool.has(instance_id):
                return pool
        raise UnknownInstanceError(f"instance {instance_id} is not on this node", param="instance_id")
