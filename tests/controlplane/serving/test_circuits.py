"""Circuits of a process: which outcomes count, for the instance and for its node."""

from controlplane.errors import NodeError
from controlplane.policies.decisions import Route
from controlplane.policies.health import CircuitSettings
from controlplane.serving.circuits import Circuits

BROKEN = NodeError("broke off")
ROUTE = Route(instance_id="i1", node_id="n1", region="east", utilization=0.0)
OTHER = Route(instance_id="i2", node_id="n1", region="east", utilization=0.0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def noted(error: NodeError, *, times: int = 3) -> tuple[Circuits, Clock]:
    clock = Clock()
    circuits = Circuits(CircuitSettings(), clock)
    for _ in range(times):
        circuits.note_end(ROUTE, error)
    return circuits, clock


def test_a_broken_connection_is_the_nodes_fault_and_an_error_the_instances() -> None:
    assert noted(BROKEN)[0].avoided() == {"i1", "n1"}
    assert noted(NodeError("lost", status=503, code="worker_lost"))[0].avoided() == {"i1"}


def test_what_says_nothing_of_health_is_not_counted() -> None:
    for status, code in ((400, "invalid_value"), (413, "x"), (429, "overloaded"), (409, "instance_not_ready")):
        assert not noted(NodeError("no", status=status, code=code), times=20)[0].avoided()


def test_an_answer_that_no_node_can_make_is_no_nodes_fault() -> None:
    assert not noted(NodeError("a defect", code="answer_failed", retryable=False), times=20)[0].avoided()


def test_one_probe_then_all_or_nothing() -> None:
    circuits, clock = noted(BROKEN)
    clock.now_s = 1.5
    assert not circuits.avoided()
    circuits.note_sent(OTHER)
    assert circuits.avoided() == {"n1"}, "the probe of the node is out"
    circuits.note_end(OTHER, None)
    assert not circuits.avoided()


def test_an_old_circuit_is_forgotten() -> None:
    circuits, clock = noted(BROKEN)
    clock.now_s = 30.0
    circuits.note_end(ROUTE, BROKEN)
    assert circuits.avoided() == {"i1", "n1"}, "one more failure opens it again"
    clock.now_s = 300.0
    assert not circuits.avoided()
    circuits.note_end(ROUTE, BROKEN)
    assert not circuits.avoided(), "one failure opens no new circuit"


def test_failures_count_until_a_probe_succeeds() -> None:
    circuits, clock = noted(BROKEN, times=2)
    for outcome in (None, BROKEN, BROKEN, None, BROKEN, BROKEN, None, BROKEN):
        assert not circuits.avoided()
        circuits.note_end(ROUTE, outcome)
    assert circuits.avoided() == {"i1", "n1"}, "most of them failed"
    clock.now_s = 2.0
    circuits.note_end(ROUTE, None)
    circuits.note_end(ROUTE, BROKEN)
    assert not circuits.avoided()
