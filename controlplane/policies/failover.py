"""Which standby of Postgres may become the primary, and what would be lost by it. For people who decide themselves:
where Patroni runs, it decides.

A commit that was acknowledged is on as many standbys as `synchronous_standby_names` asks for. So nothing is lost where
fewer standbys than that are silent, and the one that is promoted has received as much as any other that answers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from controlplane.errors import InvalidValueError


@dataclass(frozen=True, kw_only=True)
class MemberFacts:
    """One server of the cluster. `region`: its `cluster_name`, None for one that does not answer; nothing else is known
    of such a one. `timeline`: of the newest part of the write-ahead log that it has, 0 where that is not told;
    `received_bytes`: how far it has that log; `replayed_at_s`: Unix time of the last commit that a standby has
    replayed. `waits_for`: how many standbys a commit waits for by its own configuration.
    """

    address: str
    region: str | None = None
    takes_writes: bool = False
    timeline: int = 0
    received_bytes: int = 0
    replayed_at_s: float | None = None
    waits_for: int = 0


@dataclass(frozen=True, kw_only=True)
class Failover:
    """The server to promote, those that follow it then, and why not: `obstacles` forbid it, `losses` are what it would
    cost.
    """

    promoted: MemberFacts
    followers: tuple[MemberFacts, ...]
    obstacles: tuple[str, ...]
    losses: tuple[str, ...]


def standbys_waited_for(synchronous_standby_names: str) -> int:
    """How many standbys a commit waits for, from the setting of that name: `ANY 1 (a, b)`, `FIRST 2 (a, b)`, `a, b`."""
    setting = synchronous_standby_names.strip()
    if not setting:
        return 0
    counted = re.match(r"(?:(?:ANY|FIRST)\s+)?(\d+)\s*\(", setting, re.IGNORECASE)
    return int(counted[1]) if counted else 1


def choose_failover(members: Sequence[MemberFacts], region: str) -> Failover:
    """What promoting a region's server would mean.

    Raises:
        InvalidValueError: no server of that region answers.
    """
    answering = [member for member in members if member.region is not None]
    chosen = next((member for member in answering if member.region == region), None)
    if chosen is None:
        known = ", ".join(sorted(str(member.region) for member in answering)) or "none"
        raise InvalidValueError(
            f"no server of region {region!r} answers; those that do are of: {known} (their cluster_name)",
            param="region",
        )
    obstacles = tuple(_obstacle(member, chosen) for member in answering if member.takes_writes)
    followers = tuple(member for member in answering if member is not chosen and not member.takes_writes)
    silent = [member.address for member in members if member.region is None]
    losses = (*_behind(chosen, followers), *_unknown(chosen, silent))
    return Failover(promoted=chosen, followers=followers, obstacles=obstacles, losses=losses)


def _obstacle(primary: MemberFacts, chosen: MemberFacts) -> str:
    where = f"region {primary.region} at {primary.address}"
    if primary is chosen:
        return f"{where} is the primary already"
    return f"{where} is the primary and takes writes: stop it first, or there would be two"


def _behind(chosen: MemberFacts, others: Sequence[MemberFacts]) -> list[str]:
    """Standbys that have what the chosen one lacks, or may have it."""
    untold = [one.address for one in (chosen, *others) if not one.timeline]
    if untold and others:
        cause = "the user of TIDEPOOL_DATABASE_URL lacks pg_monitor, which may call pg_ls_waldir"
        whose = ", ".join(untold)
        return [f"which standby has most of the write-ahead log is not known: {whose} tells no timeline, since {cause}"]
    ahead = [one for one in others if (one.timeline, one.received_bytes) > (chosen.timeline, chosen.received_bytes)]
    return [
        f"region {one.region} has timeline {one.timeline}, which {chosen.region} has not followed: promote {one.region}"
        if one.timeline > chosen.timeline
        else f"region {one.region} has {one.received_bytes - chosen.received_bytes} bytes of the write-ahead log that "
        f"{chosen.region} lacks: promote {one.region}"
        for one in ahead
    ]


def _unknown(chosen: MemberFacts, silent: Sequence[str]) -> list[str]:
    """What nobody can tell. One of the silent servers was the primary."""
    standbys = max(0, len(silent) - 1)
    at_s = chosen.replayed_at_s
    after = "" if at_s is None else f" after {datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if chosen.waits_for == 0:
        cause, where = "commits waited for no standby (synchronous_standby_names is empty)", "the lost primary alone"
    elif standbys >= chosen.waits_for:
        cause = f"{', '.join(silent)} do not answer, and a commit waited for {chosen.waits_for} of the standbys"
        where = "silent ones alone"
    else:
        return []
    return [f"{cause}: what was acknowledged{after} may be on {where}"]
