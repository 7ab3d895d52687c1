"""Circuits: failures open them, a success closes them, one probe at a time."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.health import Circuit, CircuitSettings, OutcomeFacts, choose_circuit, probed

SETTINGS = CircuitSettings(failures_max=3, share_max=0.5, outcomes_min=10, window_s=30.0, open_s=1.0, open_max_s=8.0)


def after(circuit: Circuit, outcomes: str, *, at_s: float = 0.0, every_s: float = 0.1) -> Circuit:
    """`outcomes`: + and -, one every `every_s`."""
    for number, outcome in enumerate(outcomes):
        facts = OutcomeFacts(circuit=circuit, ok=outcome == "+")
        circuit = choose_circuit(facts, at_s + number * every_s, SETTINGS)
    return circuit


def test_failures_in_a_row_open_it() -> None:
    assert not after(Circuit(), "--").is_open(0.2)
    assert not after(Circuit(), "--+--").is_open(0.5)
    opened = after(Circuit(), "---")
    assert opened.is_open(0.3)
    assert not opened.is_open(1.3)


def test_a_share_of_failures_opens_it_within_the_window() -> None:
    assert not after(Circuit(), "-+-+-+-+-").is_open(1.0), "nine outcomes are too few"
    assert after(Circuit(), "-+-+-+-+--").is_open(1.0)
    assert not after(Circuit(), "+++-+-+-+-").is_open(1.0), "four of ten"
    assert not after(Circuit(), "-+-+-+-+--", every_s=9.0).is_open(81.0), "most of it is long ago"


def test_it_is_open_for_a_growing_time_while_probes_fail() -> None:
    circuit, now_s, lengths = after(Circuit(), "---"), 0.2, []
    for _ in range(5):
        lengths.append(round(circuit.open_until_s - now_s, 6))
        now_s = circuit.open_until_s
        circuit = probed(circuit, now_s, SETTINGS)
        assert circuit.is_open(now_s), "no second one beside the probe"
        circuit = after(circuit, "-", at_s=now_s)
    assert lengths == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_success_closes_it_and_lengths_begin_anew() -> None:
    circuit = after(probed(after(Circuit(), "---"), 2.0, SETTINGS), "-", at_s=2.0)
    closed = after(circuit, "+", at_s=3.0)
    assert closed.openings == 0
    assert not closed.is_open(3.0)
    assert after(closed, "---", at_s=4.0).open_until_s == 4.2 + SETTINGS.open_s


def test_late_failures_do_not_prolong_it() -> None:
    circuit = after(Circuit(), "---")
    assert after(circuit, "----", at_s=0.4).open_until_s == circuit.open_until_s


def test_a_lost_probe_is_followed_by_another() -> None:
    circuit = probed(after(Circuit(), "---"), 2.0, SETTINGS)
    assert circuit.is_open(2.9)
    assert not circuit.is_open(3.0)


def test_probing_what_is_closed_changes_nothing() -> None:
    assert probed(Circuit(), 1.0, SETTINGS) == Circuit()


@given(st.text("+-", max_size=40))
def test_it_is_never_open_for_longer_than_the_limit(outcomes: str) -> None:
    circuit = after(Circuit(), outcomes)
    assert circuit.open_until_s <= len(outcomes) * 0.1 + SETTINGS.open_max_s
    assert circuit.openings == 0 or "---" in outcomes or outcomes.count("-") >= 5
