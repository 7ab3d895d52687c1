"""One failover: ask every server, decide, promote one, and have the others follow it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psycopg

from controlplane.policies.failover import Failover, choose_failover
from ops.client.api import CommandError
from ops.failover.members import Member, ask_members, members_of, without_secrets


class RefusedError(CommandError):
    """The failover would lose something, or make a second primary; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A failover that was made. `accepted`: the losses that the operator took; `left`: servers that could not be told
    to follow, and why.
    """

    decision: Failover
    promoted_after_s: float
    accepted: tuple[str, ...]
    left: dict[str, str]


def decide(url: str, region: str) -> Failover:
    """What making a region's server the primary would mean; changes nothing.

    Raises:
        InvalidValueError: no server of that region answers.
    """
    return choose_failover(ask_members(members_of(url)), region)


def fail_over(url: str, region: str, *, accept_loss: bool, report: Callable[[str], None]) -> Done:
    """Make a region's server the primary. `url`: the address that names every server of the cluster.

    Before the last look at what would be lost, no standby receives from the old primary any more: one that hangs might
    go on, and promise what the new one lacks. Where no server is promoted, all receive again from where they did, and
    `report` is told of those that could not be told so.

    Raises:
        InvalidValueError: no server of that region answers.
        RefusedError: a primary takes writes, or something would be lost that is not accepted.
        psycopg.Error: the server may not be promoted by this user.
        TimeoutError: it is not promoted within a minute, or a standby still receives.
    """
    members = {member.address: member for member in members_of(url)}
    decision = _checked(choose_failover(ask_members(list(members.values())), region), accept_loss=accept_loss)
    standbys = [members[standby.address] for standby in (decision.promoted, *decision.followers)]
    had = {standby.address: standby.source() for standby in standbys}
    detached: list[Member] = []
    try:
        for standby in standbys:  # a primary that nobody hears from cannot promise anything more
            detached.append(standby)
            standby.detach()
        decision = _checked(choose_failover(ask_members(list(members.values())), region), accept_loss=accept_loss)
        report(f"promoting {decision.promoted.address}")
        after_s = members[decision.promoted.address].promote()
    except BaseException:
        _attach_again(detached, had, report)
        raise
    left = {}
    for follower in decision.followers:
        report(f"{follower.address} follows")
        try:
            members[follower.address].follow(members[decision.promoted.address], had.get(follower.address, ""))
        except (psycopg.Error, KeyboardInterrupt) as error:
            left[follower.address] = str(error).strip() or "interrupted"
    return Done(decision=decision, promoted_after_s=after_s, accepted=decision.losses, left=left)


def _attach_again(detached: Sequence[Member], had: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Have standbys receive from where they did, each whatever becomes of the others."""
    for standby in detached:
        try:
            standby.attach(had[standby.address])
        except (psycopg.Error, KeyboardInterrupt) as error:
            why = str(error).strip() or "interrupted"
            address = without_secrets(had[standby.address])
            report(f"{standby.address} receives from nobody, set its primary_conninfo again ({address}): {why}")


def _checked(decision: Failover, *, accept_loss: bool) -> Failover:
    """The decision, if it may be carried out."""
    if decision.obstacles:
        raise RefusedError("; ".join(decision.obstacles))
    if decision.losses and not accept_loss:
        raise RefusedError(f"{'; '.join(decision.losses)}. To take that: --accept-loss")
    return decision
