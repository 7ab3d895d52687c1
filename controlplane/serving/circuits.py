"""Circuit breakers by instance and by node: what keeps failing receives no requests for a while."""

import time
from collections.abc import Callable

import structlog

from controlplane.errors import NodeError
from controlplane.policies.decisions import Route
from controlplane.policies.health import Circuit, CircuitSettings, OutcomeFacts, choose_circuit, is_forgotten, probed
from dataplane.protocol.messages import ANSWER_FAILED

log = structlog.get_logger()
_NO_OUTCOME = frozenset({400, 409, 413, 429})
"""Statuses that do not count: the request was at fault, or the instance was full or not ready."""
_NODE_FAILED = "node_error"
"""The code of failures that the node did not report itself: it is unreachable, silent, or breaks the protocol."""


class Circuits:
    """Circuits by instance and by node. `clock` gives seconds."""

    def __init__(self, settings: CircuitSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._circuits: dict[str, Circuit] = {}

    def avoided(self) -> frozenset[str]:
        """Ids of instances and names of nodes whose circuit is open. Circuits without recent outcomes are deleted."""
        now_s = self._clock()
        for name in [name for name, circuit in self._circuits.items() if is_forgotten(circuit, now_s, self._settings)]:
            del self._circuits[name]
        return frozenset(name for name, circuit in self._circuits.items() if circuit.is_open(now_s))

    def note_sent(self, route: Route) -> None:
        """Record a request that is sent; after an open circuit it is the probe."""
        for name in (route.instance_id, route.node_id):
            if name in self._circuits:
                self._circuits[name] = probed(self._circuits[name], self._clock(), self._settings)

    def note_end(self, route: Route, error: NodeError | None) -> None:
        """Record how a request ended. Every failure counts for the instance, those of the connection for its node; an
        answer that no node could have made counts for none.
        """
        if error is not None and (
            error.code == ANSWER_FAILED or (error.code != _NODE_FAILED and error.status in _NO_OUTCOME)
        ):
            return
        self._note(route.instance_id, ok=error is None)
        self._note(route.node_id, ok=error is None or error.code != _NODE_FAILED)

    def _note(self, name: str, *, ok: bool) -> None:
        before = self._circuits.get(name)
        if ok and before is None:
            return  # only what has failed is remembered
        now_s = self._clock()
        after = choose_circuit(OutcomeFacts(circuit=before or Circuit(), ok=ok), now_s, self._settings)
        if after.openings > (before.openings if before is not None else 0):
            log.warning("circuit opens", of=name, for_s=round(after.open_until_s - now_s, 1))
        if all(well for _, well in after.outcomes):
            del self._circuits[name]
        else:
            self._circuits[name] = after
