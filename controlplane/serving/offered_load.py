"""Offered load: what clients ask for within their tenants' limits, each request once however often it is sent.

Official clients number their attempts (`x-stainless-retry-count`). An attempt after the first is not counted if one
before it was counted and got no answer; one that a tenant's limits refused was not counted. A gateway knows of its own
attempts only, so a retry that another gateway takes counts again, as does whatever is sent again without a number.
"""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

from controlplane.policies.facts import Endpoint
from controlplane.serving.demand_counter import DemandCounter
from controlplane.serving.in_flight import InFlightRequest
from controlplane.store.demand import IW, NIW
from dataplane.protocol.tiers import Tier

ATTEMPT_HEADER = "x-stainless-retry-count"
_UNANSWERED_KEEP_S = 300.0
"""Clients are told to come again within a minute, and wait for an answer for as long as they like."""
_UNANSWERED_MAX = 20_000


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A request as it came. `again`: its client says that it sent it before."""

    tenant: str
    body: bytes
    again: bool

    def fingerprint(self) -> bytes:
        """The same for every attempt of a request."""
        return hashlib.blake2b(self.body, key=hashlib.sha256(self.tenant.encode()).digest(), digest_size=16).digest()


class OfferedLoad:
    """Counts requests as demand of the region that they come from; one for a gateway, for its event loop."""

    def __init__(self, demand: DemandCounter) -> None:
        self._demand = demand
        self._unanswered: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        """By fingerprint, oldest first: how many were counted and got no answer, and until when that is remembered."""

    def count(self, attempt: Attempt, request: InFlightRequest) -> None:
        """A request was let in by its tenant's limits. Whether there is room for it makes no difference."""
        if request.origin is None or (attempt.again and self._was_counted(attempt.fingerprint())):
            return
        kind = NIW if request.message.tier == Tier.NIW else IW
        endpoint = Endpoint(model=request.message.model, region=request.origin)
        self._demand.count(kind, endpoint, request.input_tokens)

    def note_unanswered(self, attempt: Attempt) -> None:
        """A request that was counted got no answer, so its client may send it again."""
        fingerprint = attempt.fingerprint()
        count, _ = self._unanswered.pop(fingerprint, (0, 0.0))
        self._unanswered[fingerprint] = count + 1, time.monotonic() + _UNANSWERED_KEEP_S
        if len(self._unanswered) > _UNANSWERED_MAX:
            self._unanswered.popitem(last=False)

    def _was_counted(self, fingerprint: bytes) -> bool:
        """Whether an attempt before this one was counted; that one is now this one."""
        count, until_s = self._unanswered.pop(fingerprint, (0, 0.0))
        if count > 1:
            self._unanswered[fingerprint] = count - 1, until_s
        return count > 0 and time.monotonic() < until_s
