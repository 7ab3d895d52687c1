"""How the world's gateways choose instances: by the live policy or a rival of it, and what they know of cached prompts.

Each gateway has an index of the prompts that it sent, as live ones have; blocks are named by the trace.
"""

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from controlplane.policies.decisions import NoRoute, Route
from controlplane.policies.facts import RoutingFacts
from controlplane.policies.prefix_index import PrefixIndex, Use
from controlplane.policies.routing import RoutingSettings, choose_route
from ops.simulator.kernel.requests import BLOCK_TOKENS, Request, Served

_KEYS_MAX = 2_000_000


class Router(Protocol):
    """Chooses the instance of a request."""

    def choose(self, facts: RoutingFacts, now_s: float, settings: RoutingSettings) -> Route | NoRoute:
        """See `choose_route`."""

    def ended(self, instance_id: str) -> None:
        """A request with known blocks has ended on an instance."""


class PolicyRouter:
    """The live policy."""

    def choose(self, facts: RoutingFacts, now_s: float, settings: RoutingSettings) -> Route | NoRoute:
        return choose_route(facts, now_s, settings)

    def ended(self, instance_id: str) -> None:
        """The policy keeps no state."""


class _Sent(Struct, frozen=True, kw_only=True):
    """A request on an instance. `cached_tokens`: of its prompt, which each instance likely had cached before; `before`:
    the last use of that on its own.
    """

    instance_id: str
    cached_tokens: dict[str, int]
    before: Use | None


class KnownPrompts:
    """What gateways know of the prompts that instances have cached. Requests go to the gateways by turns."""

    def __init__(self, gateways: int) -> None:
        self._indexes = [PrefixIndex(_KEYS_MAX) for _ in range(gateways)]
        self._sent: dict[int, _Sent] = {}

    def cached_tokens(self, request: Request) -> dict[str, int]:
        """Tokens of a prompt that each instance has likely cached."""
        found = self._index_of(request).find(request.reusable)
        return {name: blocks * BLOCK_TOKENS for name, blocks in found.items()}

    def home_key(self, request: Request) -> bytes:
        """The name of a conversation: its first block."""
        return request.blocks[0].to_bytes(8, "little")

    def sent(self, request: Request, route: Route, now_s: float) -> None:
        """A request is sent to an instance."""
        index, keys, name = self._index_of(request), request.reusable, route.instance_id
        found = index.find(keys)
        before = index.last_use(keys, name, found.get(name, 0))
        cached = {each: blocks * BLOCK_TOKENS for each, blocks in found.items()}
        self._sent[request.number] = _Sent(instance_id=name, cached_tokens=cached, before=before)
        index.note(keys, name, now_s, computed=False)

    def cached_when_sent(self, request: Request) -> Mapping[str, int]:
        """Tokens of a prompt that each instance had likely cached when it was sent; nothing if it is not known."""
        sent = self._sent.get(request.number)
        return {} if sent is None else sent.cached_tokens

    def withdrawn(self, request: Request) -> None:
        """A request has left its instance before that began it."""
        if request.blocks:
            sent = self._sent.pop(request.number)
            self._index_of(request).drop(request.reusable, sent.instance_id, keep_computed=True)

    def ended(self, served: Served, now_s: float) -> str:
        """A request has ended; returns its instance."""
        request = served.request
        index, sent = self._index_of(request), self._sent.pop(request.number)
        index.note(request.reusable, sent.instance_id, now_s, computed=True)
        name, expected = sent.instance_id, sent.cached_tokens.get(sent.instance_id, 0)
        index.note_answer(name, sent.before, expected_tokens=expected, cached_tokens=served.cached)
        return name

    def _index_of(self, request: Request) -> PrefixIndex:
        return self._indexes[request.number % len(self._indexes)]
