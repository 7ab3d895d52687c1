"""What waits in the queue, as one dispatcher knows it between two reads."""

import math
import time
from collections.abc import Mapping, Sequence

import anyio.to_thread
from msgspec import structs

from controlplane.policies.facts import GroupFacts
from controlplane.store import queue
from controlplane.store.queue import Claim
from controlplane.store.session import Database

CLAIMS_MAX = 512
"""The most requests that are claimed at once."""
_SIZES_KEEP_S = 2.0
"""How long the mean sizes of requests are good while some end."""


class WaitingGroups:
    """The batch-model groups. They are read again every `poll_s` seconds, when the queue has changed, when a claim has
    found fewer than were known, and a little after requests have ended, since their sizes are known then.
    """

    def __init__(self, database: Database, *, poll_s: float) -> None:
        self._database = database
        self._poll_s = poll_s
        self._groups: dict[tuple[int, str], GroupFacts] = {}
        self._read_s = self._again_s = -math.inf

    def forget(self) -> None:
        self._again_s = -math.inf

    def note_ended(self) -> None:
        self._again_s = min(self._again_s, self._read_s + _SIZES_KEEP_S)

    async def read(self) -> tuple[GroupFacts, ...]:
        """The groups with waiting requests, aged by the time since they were read, without those whose deadline has
        passed.
        """
        now_s = time.monotonic()
        if now_s >= self._again_s:
            self._again_s = now_s + self._poll_s
            groups = await anyio.to_thread.run_sync(self._read)
            self._read_s, self._groups = now_s, {(group.batch, group.model): group for group in groups}
        passed_s = time.monotonic() - self._read_s
        return tuple(
            structs.replace(group, age_s=group.age_s + passed_s, left_s=group.left_s - passed_s)
            for group in self._groups.values()
            if group.waiting and group.left_s > passed_s
        )

    def note_claimed(self, wanted: Mapping[tuple[int, str], int], claims: Sequence[Claim]) -> None:
        """Count the claims of what was `wanted` as no longer waiting."""
        for key, count in wanted.items():
            if (group := self._groups.get(key)) is not None:
                self._groups[key] = structs.replace(group, waiting=max(0, group.waiting - count))
        if len(claims) < sum(wanted.values()) or not all(self._groups[key].waiting for key in wanted):
            self.forget()

    def _read(self) -> tuple[GroupFacts, ...]:
        with self._database.statement() as session:
            return queue.batch_groups(session, waiting_max=2 * CLAIMS_MAX)
