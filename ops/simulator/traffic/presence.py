"""The registered servers, and views of their instances.

A view of a model's instances is of the first look after a tick, and as old as that, but for what was sent since.
"""

from collections.abc import Iterable
from typing import Protocol

from msgspec.structs import replace

from controlplane.policies.facts import InstanceFacts
from ops.simulator.kernel.answers import AnswersByModel
from ops.simulator.kernel.requests import Request, Served


class Server(Protocol):
    """What serves requests of some instances: an instance's slot, a pool, a cluster. `slots`: how many it has."""

    slots: int

    @property
    def busy_s(self) -> float:
        """For how long its slots have worked, all of them together."""

    @property
    def switches(self) -> int:
        """How often a slot changed its model."""

    def fits(self, request: Request) -> bool:
        """Whether it could ever serve the request."""

    def submit(self, served: Served) -> None:
        """Take in a request that fits."""

    def reports(self, model: str | None = None) -> Iterable[InstanceFacts]:
        """Its instances as of now; if a model is named, that of the model, which is one of its own."""


class Presence:
    """The registered servers. `servers`: all that ever were, or worked for one that was."""

    def __init__(self, answers: AnswersByModel) -> None:
        self._answers = answers
        self.servers: dict[Server, None] = {}
        self._registered: dict[str, Server] = {}
        self._of_model: dict[str, dict[Server, None]] = {}
        self._numbers: dict[str, int] = {}
        self._views: dict[str, dict[str, InstanceFacts]] = {}

    def place(self, server: Server) -> None:
        """Register a server under the ids of its instances."""
        self.servers[server] = None
        for report in server.reports():
            assert report.instance_id not in self._registered
            self._registered[report.instance_id] = server
            self._of_model.setdefault(report.endpoint.model, {})[server] = None
            self._numbers.setdefault(report.instance_id, len(self._numbers))

    def employ(self, server: Server) -> None:
        """Count a server whose instances are registered by themselves."""
        self.servers[server] = None

    def withdraw(self, server: Server) -> None:
        """Unregister a server, if it is registered. Requests on the way to it are sent elsewhere."""
        for report in server.reports():
            self._registered.pop(report.instance_id, None)
            self._of_model.get(report.endpoint.model, {}).pop(server, None)

    def at(self, instance_id: str) -> Server | None:
        """The server of an instance, if it is registered."""
        return self._registered.get(instance_id)

    def tick(self) -> None:
        """Discard the views."""
        self._views.clear()

    def view(self, model: str) -> dict[str, InstanceFacts]:
        """The instances of a model by id, as of the first view since the last tick."""
        view = self._views.get(model)
        if view is None:
            reports = [report for server in self._of_model.get(model, {}) for report in server.reports(model)]
            view = self._views[model] = {report.instance_id: report for report in reports}
        return view

    def views(self) -> dict[str, dict[str, InstanceFacts]]:
        return {model: self.view(model) for model in self._of_model}

    def sent(self, request: Request, instance_id: str, cached: int = 0) -> int:
        """A request is on its way to an instance: the view knows. `cached`: tokens of the prompt that it likely has
        cached. Returns the instance's number, from 0, in the order
        in which they first stood.
        """
        view, prompt_tokens = self._views[request.model], request.prompt_tokens - cached
        answer_tokens = self._answers[request.model].rest(0, request.output_tokens)
        one = view[instance_id]
        view[instance_id] = replace(
            one,
            sent_tokens=one.sent_tokens + prompt_tokens + answer_tokens,
            sent_input_tokens=one.sent_input_tokens + prompt_tokens,
            sent_requests=one.sent_requests + 1,
        )
        return self._numbers[instance_id]
