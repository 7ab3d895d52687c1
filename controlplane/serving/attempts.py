"""A request on one instance: what that sends of the answer, and whether the request may still go elsewhere."""

import time
from collections.abc import Sequence

from controlplane.errors import ReroutedError
from controlplane.policies.decisions import Route
from controlplane.policies.rerouting import WaitingRequest
from controlplane.serving.in_flight import InFlightRequest
from controlplane.serving.node_streams import NodeStream
from controlplane.serving.prompt_prefixes import SentPrompt
from dataplane.protocol.records import RecordedEvent, TextRecord
from dataplane.protocol.tiers import Tier


class Attempt:
    """What one instance sends of an answer, as it is recorded. It is in `waiting` while it may move: until it has a
    part of the answer, if it is interactive and no other choice's prompt drew it to its instance.
    """

    def __init__(
        self, request: InFlightRequest, prompt: SentPrompt, route: Route, waiting: "dict[Attempt, None]"
    ) -> None:
        self.request = request
        self._prompt = prompt
        self._route = route
        self._begun_at = request.position
        self._sent_s, self._cached_tokens = time.monotonic(), request.cached_tokens
        self._stream: NodeStream | None = None
        self._waiting = waiting
        if request.message.tier != Tier.NIW and request.beside is None and request.rerouted_to is None:
            waiting[self] = None

    @property
    def has_begun(self) -> bool:
        """Whether it has sent a part of the answer."""
        return self.request.position != self._begun_at

    def opened(self, stream: NodeStream) -> None:
        """The request is on its way, and this will be the answer."""
        self._stream = stream

    def note(self, events: Sequence[RecordedEvent]) -> None:
        """Record events that have arrived."""
        self.request.note(events)
        self._note_begun()

    def pass_on(self, text: TextRecord) -> bool:
        """Pass text on past the stream, if whoever reads it takes text so."""
        if self.request.pass_on is None or not self.request.pass_on(text):
            return False
        self.request.note_text(text)
        self._note_begun()
        return True

    def end(self) -> None:
        """The request is on this instance no longer."""
        self._waiting.pop(self, None)

    def facts(self, request_id: str) -> WaitingRequest:
        """It, as one that waits."""
        return WaitingRequest(
            request_id=request_id,
            instance_id=self._route.instance_id,
            tier=self.request.message.tier,
            input_tokens=self.request.input_tokens,
            sent_s=self._sent_s,
            output_tokens_max=self.request.output_tokens_max,
            cached_tokens=self._cached_tokens,
            excluded=frozenset(self.request.excluded),
        )

    def move(self, route: Route) -> bool:
        """End its stream, so that the request goes to another instance. False: the answer begins just now."""
        if self.has_begun or self._stream is None:
            return False
        return self._stream.stop(ReroutedError(route.instance_id))

    def _note_begun(self) -> None:
        if not self._prompt.computed and self.has_begun:
            self._prompt.note_computed()
            self._waiting.pop(self, None)
