"""A dispatcher tells its own requests apart from what instances report, whatever has begun and ended since."""

import time
from types import SimpleNamespace
from typing import Any

from controlplane.dispatcher.in_flight import Line, LinesInFlight
from controlplane.policies.decisions import Release
from controlplane.policies.facts import Endpoint, InstanceFacts
from controlplane.store.queue import Claim

EAST = Endpoint(model="tide", region="east")


def instance(name: str = "i1", model: str = "tide", **changes: Any) -> InstanceFacts:
    values: dict[str, Any] = {
        "instance_id": name,
        "node_id": "n1",
        "endpoint": Endpoint(model=model, region="east"),
        "gpu_type": "H800",
        "accepting": True,
        "age_s": 0.0,
        "kv_used_bytes": 10_000,
        "kv_capacity_bytes": 100_000,
        "kv_bytes_per_token": 2,
        "remaining_tokens": 0,
        "requests": 10,
        "sent_tokens": 99,
        "sent_requests": 9,
    }
    return InstanceFacts(**(values | changes))


def begun(lines: LinesInFlight, name: str = "i1", *, tokens: int = 0, expected: float = 100.0) -> Line:
    claim = Claim(
        batch_number=1, line=1, epoch=1, batch_id="b", tenant="a", endpoint="/v1/x", model="tide", body="", attempts=1
    )
    release = Release(endpoint=EAST, instance_id=name, batch=1, tenant="a")
    line = lines.begin(claim, release, expected)
    sent_to(line, name, tokens)
    return line


def sent_to(line: Line, name: str, tokens: int) -> None:
    first = SimpleNamespace(routes=[SimpleNamespace(instance_id=name)])
    query: Any = SimpleNamespace(first=first, choices=[first], used_tokens=tokens)
    line.query = query


def told(lines: LinesInFlight, *instances: InstanceFacts, reported_s: float) -> list[tuple[int, int, int, float]]:
    """Of others: requests and bytes; own: requests and tokens."""
    found = lines.tell_apart(instances, dict.fromkeys((each.instance_id for each in instances), reported_s))
    assert {(each.sent_tokens, each.sent_requests) for each in found} == {(0, 0)}
    return [(each.requests, each.kv_used_bytes, each.deferred_requests, each.deferred_tokens) for each in found]


def test_what_was_sent_since_the_report_is_not_in_it() -> None:
    lines, before_s = LinesInFlight(), time.monotonic()
    begun(lines)
    begun(lines, tokens=130)
    assert told(lines, instance(), reported_s=before_s) == [(10, 10_000, 2, 100.0 + 130.0)]
    assert told(lines, instance("i2"), reported_s=before_s) == [(10, 10_000, 0, 0)]
    assert (len(lines), lines.by_endpoint()) == (2, {EAST: 2})


def test_what_was_sent_before_is_taken_out_of_it_and_what_has_ended_since_too() -> None:
    lines = LinesInFlight()
    running, ending = begun(lines, tokens=40), begun(lines, tokens=60)
    reported_s = time.monotonic()
    assert told(lines, instance(), reported_s=reported_s) == [(8, 10_000 - 2 * 100, 2, 200.0)]
    sent_to(running, "i1", 50)
    lines.end(ending)
    assert told(lines, instance(), reported_s=reported_s) == [(8, 10_000 - 2 * 100, 1, 100.0)], "as the report has them"
    later_s = time.monotonic()
    assert told(lines, instance(), reported_s=later_s) == [(9, 10_000 - 2 * 50, 1, 100.0)]
    assert lines.by_endpoint() == {EAST: 1}
    lines.end(running)
    assert told(lines, instance(requests=0, kv_used_bytes=0), reported_s=later_s) == [(0, 0, 0, 0)]
    assert lines.by_endpoint() == {}


def test_a_multiplexed_slot_reports_the_memory_of_all_its_models() -> None:
    lines = LinesInFlight()
    begun(lines, tokens=100)
    shared = instance(), instance("i2", model="x"), instance("i3", model="x", slot=1)
    assert told(lines, *shared, reported_s=time.monotonic()) == [
        (9, 9_800, 1, 100.0),
        (10, 9_800, 0, 0),
        (10, 10_000, 0, 0),
    ]


def test_a_line_without_an_instance_counts_at_its_endpoint() -> None:
    lines = LinesInFlight()
    line = begun(lines)
    line.query = None
    assert told(lines, instance(), reported_s=time.monotonic()) == [(10, 10_000, 0, 0)]
    assert lines.by_endpoint() == {EAST: 1}


def test_a_line_is_where_it_was_sent_last() -> None:
    line = begun(LinesInFlight())
    line.query = None
    assert line.sent_to == EAST
    away: Any = SimpleNamespace(
        first=SimpleNamespace(routes=[SimpleNamespace(region="east"), SimpleNamespace(region="w")])
    )
    line.query = away
    assert line.sent_to == Endpoint(model="tide", region="w")
