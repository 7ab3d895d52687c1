"""Circuits of a process: which outcomes count, for the instance and for its node."""

from controlplane.errors import NodeError
from controlplane.policies.decisions import Route
from controlplane.policies.health import CircuitSettings
from controlplane.serving.circuits import Circuits

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
    assert noted(NodeError("broke off"))[0].avoided() == {"i1", "n1"}
    assert noted(NodeError("lost", status=503, code="worker_lost"))[0].avoided() == {"i1"}


def test_what_says_nothing_of_health_is_not_counted() -> None:
    for status, code in ((400, "invalid_value"), (413, "x"), (429, "overloaded"), (409, "instance_not_ready")):
        assert not noted(NodeError("no", status=status, code=code), times=20)[0].avoided()


def test_one_probe_then_all_or_nothing() -> None:
    circuits, clock = noted(NodeError("broke off"))
    clock.now_s = 1.5
    assert not circuits.avoided()
    circuits.note_sent(OTHER)
    assert circuits.avoided() == {"n1"}, "the probe of the node is out"
    circuits.note_end(OTHER, None)
    assert not circuits.avoided()


def test_what_is_gone_is_forgotten() -> None:
    circuits, clock = noted(NodeError("broke off"))
    clock.now_s = 30.0
    circuits.avoided()
    assert set(circuits._circuits) == {"i1", "n1"}, "it may come back"
    circuits.note_sent(ROUTE)  # a probe that nobody hears of again
    clock.now_s = 200.0
    circuits.avoided()
    assert circuits._circuits == {}


def test_what_is_well_again_is_forgotten() -> None:
    circuits, _ = noted(NodeError("broke off"), times=2)
    circuits.note_end(ROUTE, None)
    assert circuits._circuits != {}
    circuits, clock = noted(NodeError("broke off"))
    clock.now_s = 2.0
    circuits.note_end(ROUTE, None)
    assert circuits._circuits == {}
