"""Which Tidepool this is."""

import platform
import subprocess
from pathlib import Path

from dataplane.protocol.version import tidepool_version

_GIT_TIMEOUT_S = 5.0


def version_text() -> str:
    """The package's version, the git revision of a checkout (`+` where it has changes), and Python's version."""
    package = tidepool_version() or "of unknown version (not installed)"
    revision = revision_of(Path(__file__).parents[1])
    return f"tidepool {package}{f' (git {revision})' if revision else ''}, Python {platform.python_version()}"


def revision_of(folder: Path) -> str | None:
    """The git revision of a checkout, `+` at its end where it has changes; None where git knows of none."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
