"""What an operator's failover would lose."""

from dataclasses import replace

import pytest

from controlplane.errors import InvalidValueError
from controlplane.policies.failover import MemberFacts, choose_failover, standbys_waited_for

LOST = MemberFacts(address="a:5432")
EAST = MemberFacts(address="b:5432", region="us-east", timeline=3, received_bytes=1000, replayed_at_s=0.0, waits_for=1)
WEST = replace(EAST, address="c:5432", region="us-west")


@pytest.mark.parametrize(
    ("setting", "count"),
    [
        ("", 0),
        ("  ", 0),
        ("ANY 1 (a, b)", 1),
        ("any 2(a, b, c)", 2),
        ("FIRST 2 (a, b)", 2),
        ("2 (a, b)", 2),
        ("a, b", 1),
    ],
)
def test_how_many_standbys_a_commit_waits_for(setting: str, count: int) -> None:
    assert standbys_waited_for(setting) == count


def test_the_standby_that_has_all_is_promoted_and_the_other_follows() -> None:
    decision = choose_failover([LOST, EAST, WEST], "us-west")
    assert (decision.promoted, decision.followers) == (WEST, (EAST,))
    assert not decision.obstacles
    assert not decision.losses


def test_the_only_standby_of_two_regions_has_all_that_was_acknowledged() -> None:
    assert not choose_failover([LOST, EAST], "us-east").losses


def test_a_standby_that_lacks_what_another_has_is_refused() -> None:
    ahead = replace(WEST, received_bytes=1500)
    assert "500 bytes" in choose_failover([LOST, EAST, ahead], "us-east").losses[0]
    assert not choose_failover([LOST, EAST, ahead], "us-west").losses


def test_an_older_timeline_counts_less_than_any_position() -> None:
    newer = replace(WEST, timeline=4, received_bytes=1)
    assert "timeline 4" in choose_failover([LOST, EAST, newer], "us-east").losses[0]


def test_standbys_whose_timelines_are_not_told_cannot_be_compared() -> None:
    untold = replace(WEST, timeline=0)
    for region in ("us-east", "us-west"):
        (loss,) = choose_failover([LOST, EAST, untold], region).losses
        assert "c:5432 tells no timeline" in loss
        assert "pg_monitor" in loss
    assert not choose_failover([LOST, untold], "us-west").losses, "there is no other to compare with"


def test_a_silent_standby_may_hold_what_nobody_else_has() -> None:
    silent = MemberFacts(address="c:5432")
    (loss,) = choose_failover([LOST, EAST, silent], "us-east").losses
    assert "a:5432, c:5432 do not answer" in loss
    assert "1970-01-01 00:00:00 UTC" in loss
    assert not choose_failover([LOST, replace(EAST, waits_for=2), silent], "us-east").losses


def test_commits_that_waited_for_nobody_may_be_lost() -> None:
    (loss,) = choose_failover([LOST, replace(EAST, waits_for=0)], "us-east").losses
    assert "synchronous_standby_names is empty" in loss


def test_a_primary_that_takes_writes_is_in_the_way() -> None:
    primary = replace(EAST, takes_writes=True)
    assert "stop it first" in choose_failover([primary, WEST], "us-west").obstacles[0]
    assert "already" in choose_failover([primary, WEST], "us-east").obstacles[0]


def test_a_region_without_an_answering_server_is_an_error_that_names_the_others() -> None:
    with pytest.raises(InvalidValueError, match=r"'mars' answers; those that do are of: us-east, us-west") as raised:
        choose_failover([LOST, EAST, WEST], "mars")
    assert raised.value.param == "region"
