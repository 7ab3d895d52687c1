"""What `tidepool doctor` reports: one finding for each thing that it looked at."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a thing is. Only failures change the exit status."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`found`: what is there; `todo`: what to do about it, absent where all is well."""

    check: str
    level: Level
    found: str
    todo: str | None = None


def good(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check=check, level=Level.OK, found=found)


def warning(check: str, found: str, todo: str) -> Finding:
    """It works, and should be looked at."""
    return Finding(check=check, level=Level.WARNING, found=found, todo=todo)


def failure(check: str, found: str, todo: str) -> Finding:
    """It does not work, or will lose something."""
    return Finding(check=check, level=Level.FAILURE, found=found, todo=todo)
