"""The system's health as text, for `status` and `top`: causes of `/readyz`, and the last success of each loop."""

from collections.abc import Mapping, Sequence
from typing import Any

_PARTS = {"missing": "missing", "away": "away", "late": "late loops", "lost": "lost nodes", "behind": "behind"}


def health_causes(health: Mapping[str, Any]) -> str:
    """Causes of degraded health: `away: redis; late loops: plan`. Empty: none. While the primary database is away, or
    the region's copy of it is behind, also how old that may be. Gateways of an older version name fewer parts.
    """
    causes = [f"{title}: {', '.join(health[part])}" for part, title in _PARTS.items() if health.get(part)]
    age_s = health.get("replica_age_s")
    if age_s is not None and (health["behind"] or "postgres" in health["away"]):
        causes.append(f"the region's copy of the database may be {_age(age_s)} old")
    if (health.get("reported_term") or 0) > (health.get("term") or 0):
        causes.append(f"nodes have seen term {health['reported_term']}, this primary is in {health['term']}")
    return "; ".join(causes)


def loops_text(loops: Sequence[Mapping[str, Any]]) -> str:
    """The age of each loop's last success, late and failing loops first."""
    return "; ".join(map(_loop_text, sorted(loops, key=lambda loop: (not loop["late"], not _fails(loop))))) or "unknown"


def _loop_text(loop: Mapping[str, Any]) -> str:
    text = f"{loop['loop']} {'never' if loop['since_success_s'] is None else _age(loop['since_success_s'])}"
    text += " LATE" if loop["late"] else ""
    return f"{text} ({loop['last_error']})" if _fails(loop) else text


def _fails(loop: Mapping[str, Any]) -> bool:
    """Whether its last run failed."""
    success_s, failure_s = loop["since_success_s"], loop["since_failure_s"]
    return failure_s is not None and (success_s is None or failure_s < success_s)


def _age(seconds: float) -> str:
    """In the largest unit of which there are two."""
    for unit, of_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * of_s:
            return f"{seconds / of_s:.0f} {unit}"
    return f"{seconds:.0f} s"
