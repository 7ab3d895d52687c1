"""Unknown environment variables with our prefix: a misspelt or removed setting must not be ignored silently."""

import difflib
from collections.abc import Iterable, Mapping

from controlplane.settings import Settings
from dataplane.agent.settings import AgentSettings
from dataplane.runtime.logs import LogSettings

_PREFIX = "TIDEPOOL_"
_AGENT_PREFIX = f"{_PREFIX}AGENT_"
OTHER_VARIABLES: Mapping[str, str] = {
    "TIDEPOOL_URL": "address of the API for commands, as with `--url`",
    "TIDEPOOL_ADMIN_KEY": "API key for commands that run the fleet, as with `--key`",
    "TIDEPOOL_KEY": "API key for commands that send requests",
    "TIDEPOOL_POSTGRES_USER": "system user that runs the embedded Postgres where `tidepool up` runs as root",
    "TIDEPOOL_DATA": "folder of published traces and latency profiles; tests that need it are skipped without",
}
"""Other variables, which the command line, the embedded servers and the tests read."""
_TESTS_PREFIX = f"{_PREFIX}TEST_"


def known_settings() -> set[str]:
    """The settings of all processes."""
    known = {_PREFIX + name.upper() for name in Settings.model_fields}
    known |= {f"{_PREFIX}LOG_{name.upper()}" for name in LogSettings.model_fields}
    return known | {_AGENT_PREFIX + name.upper() for name in AgentSettings.model_fields}


def unknown_settings(names: Iterable[str]) -> list[str]:
    """A warning for each environment variable with our prefix that no process reads."""
    known = {*OTHER_VARIABLES} | known_settings()
    unknown = {name for name in names if name.startswith(_PREFIX) and not name.startswith(_TESTS_PREFIX)} - known
    return [_warning(name, known) for name in sorted(unknown)]


def _warning(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"{name} is no setting" + (f"; did you mean {close[0]}?" if close else "")
