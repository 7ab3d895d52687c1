"""Offered load: what clients ask for within their tenants' limits, each request once for all its retries.

Official clients number their attempts (`x-stainless-retry-count`). A retry is not counted if an earlier attempt was
counted and got no answer; an attempt that a tenant's limits refused was not counted. A gateway knows only its own
attempts: a retry at another gateway, or without a number, counts again.
"""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

from controlplane.policies.facts import Endpoint
from controlplane.serving.demand_counter import DemandCounter
from controlplane.serving.fan_out import InFlightQuery
from controlplane.store.demand import IW, NIW
from dataplane.protocol.tiers import Tier

ATTEMPT_HEADER = "x-stainless-retry-count"
_UNANSWERED_KEEP_S = 300.0
"""Longer than the Retry-After of any answer (a minute)."""
_UNANSWERED_MAX = 20_000


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A request as it arrived. `again`: its client marks it as a retry."""

    tenant: str
    body: bytes
    again: bool

    def fingerprint(self) -> bytes:
        """A hash that is the same for every attempt of a request."""
        return hashlib.blake2b(self.body, key=hashlib.sha256(self.tenant.encode()).digest(), digest_size=16).digest()


class OfferedLoad:
    """Counts requests as demand of their region of origin; one for a gateway, used in its event loop."""

    def __init__(self, demand: DemandCounter) -> None:
        self._demand = demand
        self._unanswered: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        """By fingerprint, oldest first: how many counted attempts got no answer, and until when that is remembered."""

    def count(self, attempt: Attempt, query: InFlightQuery) -> None:
        """Count a request that its tenant's limits admit, whether or not there is capacity for it."""
        if query.first.origin is None or (attempt.again and self._was_counted(attempt.fingerprint())):
            return
        kind = NIW if query.query.tier == Tier.NIW else IW
        endpoint = Endpoint(model=query.query.model, region=query.first.origin)
        self._demand.count(kind, endpoint, query.input_tokens)

    def note_unanswered(self, attempt: Attempt) -> None:
        """A counted request got no answer: its client may retry."""
        fingerprint = attempt.fingerprint()
        count, _ = self._unanswered.pop(fingerprint, (0, 0.0))
        self._unanswered[fingerprint] = count + 1, time.monotonic() + _UNANSWERED_KEEP_S
        if len(self._unanswered) > _UNANSWERED_MAX:
            self._unanswered.popitem(last=False)

    def _was_counted(self, fingerprint: bytes) -> bool:
        """Whether an earlier attempt was counted; this attempt takes its count over."""
        count, until_s = self._unanswered.pop(fingerprint, (0, 0.0))
        if count > 1:
            self._unanswered[fingerprint] = count - 1, until_s
        return count > 0 and time.monotonic() < until_s
