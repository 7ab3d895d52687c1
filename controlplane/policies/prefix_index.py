"""Which instances have likely cached a prompt's beginning: an approximate index, kept by whoever routes.

A prompt is a chain of keys: each stands for a piece of the prompt and all pieces before it. The index records for each
key which instances have computed it and when they last used it. It asks no instance: it learns from what was sent and
from how much of a prompt an instance had cached. Where an instance no longer has what it used at some moment, it has
evicted all that was last used before, since caches evict the least recently used first.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

HOLDERS_MAX = 16
"""Instances of one key at most; the most recent ones are kept."""
_EVICTED_BELOW = 0.5
"""An instance that had cached less than this share of what was expected has evicted it."""


class Use(Struct, frozen=True, gc=False):
    """When an instance last used a prefix. `computed`: it has answered since; until then the prefix is computed."""

    used_s: float
    computed: bool


class PrefixIndex:
    """At most `keys_max` keys, the least recently used of which are dropped. Times are of the caller's clock."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._uses: OrderedDict[int, dict[str, Use]] = OrderedDict()
        """By key and instance; instances in the order of their last use."""
        self._evicted_s: dict[str, float] = {}
        """By instance: what it used last at this time or before is evicted."""

    def __len__(self) -> int:
        return len(self._uses)

    def find(self, keys: Sequence[int]) -> dict[str, int]:
        """How many of the first keys each instance has likely cached; only instances that have any."""
        found: dict[str, int] = {}
        for depth, key in enumerate(keys):
            here = [name for name in self._uses.get(key, ()) if found.get(name, 0) == depth and self._use(key, name)]
            if not here:
                break
            for name in here:
                found[name] = depth + 1
        return found

    def last_use(self, keys: Sequence[int], instance: str, count: int) -> Use | None:
        """When an instance last used the first `count` keys; None if it has likely not cached them."""
        return self._use(keys[count - 1], instance) if count else None

    def note(self, keys: Sequence[int], instance: str, now_s: float, *, computed: bool) -> None:
        """An instance uses a prompt now. `computed`: all of it has been computed."""
        use = Use(now_s, computed)
        for key in reversed(keys):  # the beginning is used last, and dropped last
            uses = self._uses.get(key)
            if uses is None:
                self._uses[key] = {instance: use}
                continue
            self._uses.move_to_end(key)
            before = self._use(key, instance)
            uses.pop(instance, None)  # it comes last
            uses[instance] = use if before is None or not before.computed else Use(now_s, True)
            if len(uses) > HOLDERS_MAX:
                del uses[next(iter(uses))]
        while len(self._uses) > self._keys_max:
            self._uses.popitem(last=False)

    def drop(self, keys: Sequence[int], instance: str, *, keep_computed: bool = False) -> None:
        """An instance did not compute this prompt. `keep_computed`: what it has computed for others stays."""
        for key in keys:
            uses = self._uses.get(key, {})
            if instance in uses and not (keep_computed and uses[instance].computed):
                del uses[instance]
                if not uses:
                    del self._uses[key]

    def note_answer(self, instance: str, before: Use | None, *, expected_tokens: int, cached_tokens: int) -> None:
        """An instance has answered a prompt and says how much of it was cached. One that should have had the prompt and
        did not has evicted it, and all that it last used before. `before`: the last use of what was expected.
        """
        if before is not None and before.computed and cached_tokens < _EVICTED_BELOW * expected_tokens:
            self.note_evicted(instance, before.used_s)

    def note_evicted(self, instance: str, used_s: float) -> None:
        """An instance no longer has what it used last at this time or before."""
        self._evicted_s[instance] = max(used_s, self._evicted_s.get(instance, -math.inf))

    def forget(self, instance: str) -> None:
        """An instance is gone, whose id will not return."""
        self._evicted_s.pop(instance, None)

    def _use(self, key: int, instance: str) -> Use | None:
        use = self._uses.get(key, {}).get(instance)
        return use if use is not None and use.used_s > self._evicted_s.get(instance, -math.inf) else None
