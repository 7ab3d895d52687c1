"""When a lost region's server counts as one that follows again."""

from dataclasses import replace

from controlplane.policies.failover import MemberFacts
from ops.faults.regional.returned import follows

PRIMARY = MemberFacts(address="b", region="south", takes_writes=True, timeline=2)
BACK = MemberFacts(address="a", region="north", timeline=2)


def test_a_lost_server_is_back_when_it_follows_another() -> None:
    assert follows([PRIMARY, BACK], "north")


def test_it_is_not_back_while_it_is_silent_or_elsewhere_or_the_primary() -> None:
    assert not follows([PRIMARY, MemberFacts(address="a")], "north")
    assert not follows([PRIMARY, replace(BACK, timeline=1)], "north")
    assert not follows([PRIMARY, replace(BACK, takes_writes=True)], "north")
    assert not follows([PRIMARY, BACK], "south")
