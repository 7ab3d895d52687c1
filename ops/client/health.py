"""The system's health in words, for `status` and `top`: what `/readyz` says, and when each loop last succeeded."""

from collections.abc import Mapping, Sequence
from typing import Any

_PARTS = {"missing": "missing", "away": "away", "late": "late loops", "lost": "lost nodes"}


def health_causes(health: Mapping[str, Any]) -> str:
    """What keeps the system from being well: `away: redis; late loops: plan`. Empty: nothing."""
    return "; ".join(f"{words}: {', '.join(health[part])}" for part, words in _PARTS.items() if health[part])


def loops_words(loops: Sequence[Mapping[str, Any]]) -> str:
    """How long ago each loop last succeeded, those that need a look first."""
    return (
        "; ".join(map(_loop_words, sorted(loops, key=lambda loop: (not loop["late"], not _fails(loop))))) or "unknown"
    )


def _loop_words(loop: Mapping[str, Any]) -> str:
    words = f"{loop['loop']} {'never' if loop['since_success_s'] is None else _age(loop['since_success_s'])}"
    words += " LATE" if loop["late"] else ""
    return f"{words} ({loop['last_error']})" if _fails(loop) else words


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
