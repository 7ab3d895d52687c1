"""The isolation bench: its load is the same in every arm, its figures are what they say, and ungated means at once."""

from pathlib import Path

import msgspec
import pytest

from controlplane.policies.facts import Endpoint, GroupFacts, InstanceFacts, ReleaseFacts
from controlplane.policies.release import ReleaseSettings, choose_releases
from ops.bench.gateway.isolation import Round, drawn, rows
from ops.bench.gateway.isolation_ungated import switched

FULL = InstanceFacts(
    instance_id="i1",
    node_id="n1",
    endpoint=Endpoint(model="tide", region="here"),
    gpu_type="H800",
    accepting=True,
    age_s=0.0,
    kv_used_bytes=99,
    kv_capacity_bytes=100,
    remaining_tokens=10,
    sent_tokens=0,
)
GROUP = GroupFacts(batch=1, tenant="acme", model="tide", age_s=10.0, left_s=80_000.0, waiting=7, left=7)


def test_arrivals_are_drawn_once_for_all_arms() -> None:
    first, again = (drawn(3, per_s=5.0, seconds=40.0) for _ in range(2))
    assert first == again != drawn(4, per_s=5.0, seconds=40.0)
    assert 100 < len(first) < 300
    assert [arrival.at_s for arrival in first] == sorted(arrival.at_s for arrival in first)


def test_a_full_endpoint_gets_everything_while_the_flag_is_there(tmp_path: Path) -> None:
    flag = tmp_path / "ungated"
    policy = switched(choose_releases, flag)
    facts = ReleaseFacts(groups=(GROUP, msgspec.structs.replace(GROUP, batch=2, model="ebb")), instances=(FULL,))
    assert policy(facts, 0.0, ReleaseSettings()) == ()
    flag.touch()
    released = policy(facts, 0.0, ReleaseSettings())
    assert [each.batch for each in released] == [1] * 7


def test_each_round_is_held_against_its_own_round_without_a_batch() -> None:
    def one(arm: str, number: int, p95_s: float, done: float | None = None) -> Round:
        return Round(
            arm=arm,  # type: ignore[arg-type]
            number=number,
            requests=10,
            unanswered={},
            ttft_p50_s=0.1,
            ttft_p95_s=p95_s,
            batch_done=done,
            batch_s=None if done != 1 else 9.0,
        )

    found = [
        *(one("no batch", number, p95_s) for number, p95_s in enumerate((1.0, 2.0, 4.0))),
        *(one("gated", number, p95_s, 1.0) for number, p95_s in enumerate((1.1, 2.0, 8.0))),
        *(one("ungated", number, p95_s, 0.5 + number / 10) for number, p95_s in enumerate((2.0, 4.0, 8.0))),
    ]
    _, gated, ungated = rows(found)
    assert (gated.moves, gated.batch_done, gated.batch_s) == (pytest.approx(0.1), 1.0, 9.0)
    assert (ungated.moves, ungated.batch_done, ungated.batch_s) == (pytest.approx(1.0), 0.5, None)
