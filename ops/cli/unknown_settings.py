"""Variables that look like settings and are none: a misspelt or removed setting must not be ignored in silence."""

import difflib
from collections.abc import Iterable

from controlplane.settings import Settings
from dataplane.agent.settings import AgentSettings
from dataplane.runtime.logs import LogSettings

_PREFIX = "TIDEPOOL_"
_AGENT_PREFIX = f"{_PREFIX}AGENT_"
_NOT_SETTINGS = frozenset(
    {"TIDEPOOL_ADMIN_KEY", "TIDEPOOL_KEY", "TIDEPOOL_URL", "TIDEPOOL_POSTGRES_USER", "TIDEPOOL_DATA", "TIDEPOOL_SOAK_S"}
)
"""Read by the command line, the embedded servers and the tests."""
_TESTS_PREFIX = f"{_PREFIX}TEST_"


def unknown_settings(names: Iterable[str]) -> list[str]:
    """One complaint for each of these names of environment variables that begins as ours do and that nobody reads."""
    known = _NOT_SETTINGS | {_PREFIX + name.upper() for name in Settings.model_fields}
    known |= {f"{_PREFIX}LOG_{name.upper()}" for name in LogSettings.model_fields}
    known |= {_AGENT_PREFIX + name.upper() for name in AgentSettings.model_fields}
    strangers = {name for name in names if name.startswith(_PREFIX) and not name.startswith(_TESTS_PREFIX)} - known
    return [_complaint(name, known) for name in sorted(strangers)]


def _complaint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"{name} is no setting" + (f"; did you mean {close[0]}?" if close else "")
