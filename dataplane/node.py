"""A node: follows its desired instances, and admits requests to them."""

import asyncio
from collections import Counter

from dataplane.answers import Answer, check_sampling, engine_request, tokenize
from dataplane.errors import BadRequestError, OverloadedError, StaleGenerationError, UnknownInstanceError
from dataplane.messages import DesiredInstance, DesiredInstances, Generate, Heartbeat, InstanceReport
from dataplane.settings import AgentSettings
from dataplane.slots import Slot
from dataplane.text import TextStream


class Agent:
    """One node. Everything happens on one event loop; `changed` is set when the control plane should hear of it."""

    def __init__(self, settings: AgentSettings, boot_id: str) -> None:
        self.settings = settings
        self.boot_id = boot_id
        self.changed = asyncio.Event()
        self.prompt_tokens_total: Counter[str] = Counter()
        self.generation_tokens_total: Counter[str] = Counter()
        self._generation = 0
        self._misplaced: tuple[DesiredInstance, ...] = ()
        self.slots = tuple(
            Slot(index, slot, settings, on_change=self.changed.set) for index, slot in enumerate(settings.slots)
        )

    @property
    def generation(self) -> int:
        """The desired state this node follows; 0 before it heard of any."""
        return self._generation

    async def run(self) -> None:
        """Keep every slot's worker running until cancelled; then end them."""
        async with asyncio.TaskGroup() as group:
            for slot in self.slots:
                group.create_task(slot.run())

    def apply(self, desired: DesiredInstances) -> None:
        """Follow a desired state.

        Raises:
            dataplane.errors.StaleGenerationError: this node follows a newer one.
        """
        if desired.generation < self._generation:
            raise StaleGenerationError(
                f"generation {desired.generation} is older than {self._generation}, which this node follows",
                param="generation",
            )
        self._generation = desired.generation
        for slot in self.slots:
            slot.follow(instance for instance in desired.instances if instance.slot == slot.index)
        self._misplaced = tuple(i for i in desired.instances if not 0 <= i.slot < len(self.slots))

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
                error=f"slot {instance.slot} does not exist; this node has {len(self.slots)}",
            )
            for instance in self._misplaced
        ]
        return (*(report for slot in self.slots for report in slot.reports()), *misplaced)

    def heartbeat(self) -> Heartbeat:
        """What the control plane is told each second."""
        return Heartbeat(
            node=self.settings.node,
            boot_id=self.boot_id,
            generation=self._generation,
            instances=self.reports(),
            switches_total=self.switches_total,
        )

    @property
    def switches_total(self) -> int:
        """Model switches on all slots since the agent started."""
        return sum(slot.switches_total for slot in self.slots)

    async def admit(self, generate: Generate) -> Answer:
        """Check and tokenize a request, and send it to its instance.

        Raises:
            dataplane.errors.DataplaneError: the refusal; its class says why.
        """
        check_sampling(generate, stop_strings_max=self.settings.stop_strings_max)
        slot = self._slot_of(generate.instance_id)
        held = slot.ready_instance(generate.instance_id)
        model = held.desired.model
        if generate.model != model.name:
            raise BadRequestError(
                f"instance {generate.instance_id} runs {model.name}, not {generate.model}", param="model"
            )
        self._check_queue(slot)
        assert held.text is not None, "an instance is ready only with its tokenizer"
        prompt = await tokenize(generate, held.text)
        self._check_queue(slot)
        capacity = slot.kv_capacity_bytes(generate.instance_id)
        request = engine_request(generate, prompt, model, kv_capacity_bytes=capacity)
        flight = slot.submit(request)
        self.prompt_tokens_total[model.name] += len(prompt)

        def count_tokens(tokens: int) -> None:
            self.generation_tokens_total[model.name] += tokens

        text = TextStream(held.text, generate.sampling.stop)
        return Answer(flight, text, cancel=slot.cancel, count_tokens=count_tokens)

    def _check_queue(self, slot: Slot) -> None:
        if slot.in_flight >= self.settings.queue_max:
            raise OverloadedError(f"slot {slot.index} has {slot.in_flight} requests in flight, its limit")

    def _slot_of(self, instance_id: str) -> Slot:
        for slot in self.slots:
            if slot.holds(instance_id):
                return slot
        raise UnknownInstanceError(f"instance {instance_id} is not on this node", param="instance_id")
