"""Circuit breakers: a circuit for each instance and node, opened by failures, closed by a success. Pure.

    closed --(failures in a row, or their share)--> open for open_s, twice as long each time --(over)--> one probe
       ^                                                  ^                                                |
       +---------------- it succeeds --------------------- + ------------------ it fails ------------------+

A probe keeps the circuit open for as long again, so that no second probe is sent meanwhile, and another one follows if
it is lost.
"""

from dataclasses import dataclass, replace

_OUTCOMES_KEPT = 50


@dataclass(frozen=True, kw_only=True)
class CircuitSettings:
    """A circuit opens after `failures_max` failures in a row, or when at least `share_max` of at least `outcomes_min`
    outcomes within `window_s` failed. It is open for `open_s` at first and `open_max_s` at most.
    """

    failures_max: int = 3
    share_max: float = 0.5
    outcomes_min: int = 10
    window_s: float = 30.0
    open_s: float = 1.0
    open_max_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Circuit:
    """`outcomes`: times and successes, oldest first. `openings`: since it was last closed. `probing`: one request is in
    flight as a probe.
    """

    outcomes: tuple[tuple[float, bool], ...] = ()
    openings: int = 0
    open_until_s: float = 0.0
    probing: bool = False

    def is_open(self, now_s: float) -> bool:
        """Whether no requests may be sent now."""
        return self.openings > 0 and now_s < self.open_until_s


@dataclass(frozen=True, kw_only=True)
class OutcomeFacts:
    """The circuit of an instance or node, and whether a request to it has just succeeded."""

    circuit: Circuit
    ok: bool


def choose_circuit(facts: OutcomeFacts, now_s: float, settings: CircuitSettings) -> Circuit:
    """The circuit after the outcome. A success closes it; failures of requests sent before it opened do not count."""
    circuit = facts.circuit
    if facts.ok and circuit.openings:
        return Circuit(outcomes=((now_s, True),))
    recent = [outcome for outcome in circuit.outcomes if now_s - outcome[0] <= settings.window_s]
    outcomes = (*recent, (now_s, facts.ok))[-_OUTCOMES_KEPT:]
    noted = replace(circuit, outcomes=outcomes)
    if facts.ok:
        return noted
    if circuit.openings:
        late = circuit.is_open(now_s) and not circuit.probing
        return noted if late else _opened(noted, now_s, settings)
    last = [ok for _, ok in outcomes[-settings.failures_max :]]
    in_a_row = len(last) == settings.failures_max and not any(last)
    failures = sum(not ok for _, ok in outcomes)
    too_many = len(outcomes) >= settings.outcomes_min and failures >= settings.share_max * len(outcomes)
    return _opened(noted, now_s, settings) if in_a_row or too_many else noted


def probed(circuit: Circuit, now_s: float, settings: CircuitSettings) -> Circuit:
    """The circuit after a request was sent: if it had been open, the request is the probe, and no other is sent."""
    if not circuit.openings:
        return circuit
    return replace(circuit, probing=True, open_until_s=now_s + _open_s(circuit.openings, settings))


def is_forgotten(circuit: Circuit, now_s: float, settings: CircuitSettings) -> bool:
    """Whether the circuit is closed and its last outcome so old that it can be deleted."""
    last_s = circuit.outcomes[-1][0] if circuit.outcomes else 0.0
    return now_s - max(last_s, circuit.open_until_s) > max(settings.open_max_s, settings.window_s)


def _opened(circuit: Circuit, now_s: float, settings: CircuitSettings) -> Circuit:
    openings = circuit.openings + 1
    until_s = now_s + _open_s(openings, settings)
    return replace(circuit, openings=openings, open_until_s=until_s, probing=False)


def _open_s(openings: int, settings: CircuitSettings) -> float:
    return float(min(settings.open_s * 2 ** min(openings - 1, 30), settings.open_max_s))
