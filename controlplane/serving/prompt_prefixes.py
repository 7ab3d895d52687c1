"""What this process knows of the prompts that instances have cached: an approximate index of what it sent them.

Prompts are compared by their content before tokenization, in pieces that grow with their position, so that a prompt of
60 kB is a chain of 37 keys and a match is exact to an eighth. No state is shared between processes: each learns from
its own traffic, and all send the first request of a conversation to the same home instance unless load forbids it.
"""

import hashlib
import time
from array import array
from bisect import bisect_right

import msgspec

from controlplane.policies.decisions import Route
from controlplane.policies.prefix_index import PrefixIndex, Use
from controlplane.store.redis.live import EMPTY_VIEW, FleetView
from dataplane.protocol.messages import Finished, Generate

_FIRST_PIECE_BYTES = 256
_LENGTH_MAX = 2**26
_HOME_BYTES = 4096
"""How much of a prompt's leading content names its conversation."""
_LOST = ("loading", "failed")
"""States in which an instance has nothing cached."""


def _boundaries() -> list[int]:
    ends, end = [], 0
    while end < _LENGTH_MAX:
        end += max(_FIRST_PIECE_BYTES, end // 8)
        ends.append(end)
    return ends


_BOUNDARIES = _boundaries()
"""Where pieces end, in bytes from the beginning."""


class PromptPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as the index sees it: a key for each piece and all before it. `size_bytes`: of the whole content.
    `home_key`: the same for all turns of a conversation, and in all processes.
    """

    keys: tuple[int, ...]
    size_bytes: int
    home_key: bytes

    def tokens(self, pieces: int, input_tokens: int) -> int:
        """About how many of the prompt's tokens the first pieces hold."""
        return input_tokens * _BOUNDARIES[pieces - 1] // self.size_bytes if pieces else 0


def prefix_of(message: Generate, prompt_cache_key: str = "") -> PromptPrefix:
    """The prefix of a prompt. Prompts of other models, tenants and salts have other keys. A `prompt_cache_key` replaces
    the leading content as the name of the conversation.
    """
    content = _content(message)
    owner = (message.cache_salt, message.model)
    keys, key, begin = [], hash(owner), 0
    for end in _BOUNDARIES[: bisect_right(_BOUNDARIES, len(content))]:
        key = hash((key, content[begin:end]))
        keys.append(key)
        begin = end
    name = conversation_name(message, prompt_cache_key)
    home = hashlib.blake2b(msgspec.json.encode((*owner, bool(prompt_cache_key))) + name, digest_size=16)
    return PromptPrefix(keys=tuple(keys), size_bytes=len(content), home_key=home.digest())


def conversation_name(message: Generate, prompt_cache_key: str = "") -> bytes:
    """What all turns of a conversation have in common: the client's name for it, else the prompt up to the first user
    message, or its beginning where it is no chat.
    """
    if prompt_cache_key:
        return prompt_cache_key.encode()
    if message.messages is None:
        return _content(message)[:_HOME_BYTES]
    first = next((number for number, each in enumerate(message.messages) if each.role == "user"), 0)
    return msgspec.json.encode(message.messages[: first + 1])[-_HOME_BYTES:]


def _content(message: Generate) -> bytes:
    if message.prompt_tokens is not None:
        return array("I", (token & 0xFFFFFFFF for token in message.prompt_tokens)).tobytes()
    if message.messages is None:
        return (message.prompt or "").encode(errors="replace")
    before = b"" if message.tools is None else msgspec.json.encode(message.tools)
    if message.template:
        before += msgspec.json.encode(message.template)
    return before + msgspec.json.encode(message.messages)


class CachedPrefixes:
    """The index of one process."""

    def __init__(self, keys_max: int) -> None:
        self._index = PrefixIndex(keys_max)
        self._view = EMPTY_VIEW
        self._boots: dict[str, str] = {}
        """The boot id of each instance's node."""

    def follow(self, view: FleetView) -> None:
        """Forget what instances had cached that have restarted or are gone, once for each view."""
        if view is self._view:
            return
        self._view, now_s = view, time.monotonic()
        boots: dict[str, str] = {}
        for node in view.nodes.values():
            for report in node.heartbeat.instances:
                name = report.instance_id
                boots[name] = boot = node.heartbeat.boot_id
                if self._boots.get(name) != boot or report.state in _LOST:
                    self._index.note_evicted(name, now_s)
        for gone in self._boots.keys() - boots.keys():
            self._index.forget(gone)
        self._boots = boots

    def cached_tokens(self, prefix: PromptPrefix, input_tokens: int) -> dict[str, int]:
        """How many of a prompt's tokens each instance has likely cached."""
        found = self._index.find(prefix.keys)
        return {name: prefix.tokens(pieces, input_tokens) for name, pieces in found.items()}

    def begin(self, prefix: PromptPrefix, route: Route) -> "SentPrompt":
        """A prompt is sent to an instance."""
        return SentPrompt(self._index, prefix, route)


class SentPrompt:
    """A prompt on an instance. The index expects it there as soon as it is sent, so that those which follow at once go
    to the same instance.
    """

    def __init__(self, index: PrefixIndex, prefix: PromptPrefix, route: Route) -> None:
        self._index = index
        self._keys = prefix.keys
        self._route = route
        pieces = index.find(prefix.keys).get(route.instance_id, 0)
        self._before: Use | None = index.last_use(prefix.keys, route.instance_id, pieces)
        self.computed = False
        self._note(computed=False)

    def note_computed(self) -> None:
        """The first token is there."""
        self.computed = True
        self._note(computed=True)

    def note_end(self, end: Finished) -> None:
        """The answer is complete."""
        route = self._route
        self._index.note_answer(
            route.instance_id, self._before, expected_tokens=route.cached_tokens, cached_tokens=end.cached_tokens
        )

    def note_failed(self) -> None:
        """The instance failed: whatever it computed of the prompt is not counted on."""
        self._index.drop(self._keys, self._route.instance_id)

    def note_withdrawn(self) -> None:
        """The request has left before the instance began it."""
        self._index.drop(self._keys, self._route.instance_id, keep_computed=True)

    def _note(self, *, computed: bool) -> None:
        self._index.note(self._keys, self._route.instance_id, time.monotonic(), computed=computed)
