"""Small questions that any instance of a model can answer: its node is asked once, and another one if that fails."""

import msgspec

from controlplane.errors import CapacityError, NodeError
from controlplane.policies.facts import InstanceFacts
from controlplane.policies.routing import is_usable
from controlplane.serving.agent_client import AgentClient, Answered
from controlplane.serving.fleet_cache import FleetCache
from controlplane.settings import Settings
from dataplane.protocol.messages import Detokenize, Tokenize


class NodeQuestions:
    """Asks nodes; one for a process."""

    def __init__(self, fleet: FleetCache, agents: AgentClient, settings: Settings) -> None:
        self._fleet = fleet
        self._agents = agents
        self._settings = settings

    async def ask(
        self, path: str, question: Tokenize | Detokenize, answer: type[Answered], *, origin: str | None
    ) -> Answered:
        """The answer of the first instance that gives one, those in regions that `origin` prefers first.

        Raises:
            CapacityError: no instance of the model can be asked now.
            NodeError: the question is at fault, or every instance that was asked failed.
        """
        failure: NodeError | None = None
        for instance in self._candidates(question.model, origin)[: self._settings.request_attempts_max]:
            url = self._fleet.node_url(instance.node_id)
            asked = msgspec.structs.replace(question, instance_id=instance.instance_id)
            try:
                if url is None:
                    raise NodeError(f"node '{instance.node_id}' has no address")
                return await self._agents.ask(f"{url}{path}", asked, answer)
            except NodeError as error:
                if not error.retryable:
                    raise
                failure = error
        raise failure or CapacityError(f"no instance of '{question.model}' is ready; try again")

    def _candidates(self, model: str, origin: str | None) -> list[InstanceFacts]:
        """The usable instances, by region in order of preference, and there the least busy first."""
        order = {region: number for number, region in enumerate(self._fleet.preference(origin))}
        usable = [one for one in self._fleet.instances(model) if is_usable(one, self._settings.heartbeat_stale_s)]
        return sorted(usable, key=lambda one: (order.get(one.endpoint.region, len(order)), one.remaining_tokens))
