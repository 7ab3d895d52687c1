"""Reading again and again what a command waits for, across an API that restarts."""

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from ops.client.api import Api, CommandError, UnreachableError
from ops.client.screen import notes

POLL_S = 1.0
PATIENCE_S = 600.0
"""Longer than an upgrade replaces the API, or a primary of the database is lost."""
_AWAY = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})


def reread(api: Api, path: str, *, patience_s: float = PATIENCE_S, pause: Callable[[float], None] = time.sleep) -> Any:
    """Read something after a pause. An API that is away is reported once and asked again for `patience_s`. `pause`
    sleeps for a number of seconds.

    Raises:
        CommandError: the API refuses, or it stays away for longer.
    """
    until_s = None
    while True:
        pause(POLL_S)
        try:
            return api.get(path)
        except CommandError as error:
            if not isinstance(error, UnreachableError) and error.status not in _AWAY:
                raise
            if until_s is None:
                until_s = time.monotonic() + patience_s
                notes().print(f"{error}; trying again for {patience_s / 60:g} minutes", markup=False)
            if time.monotonic() >= until_s:
                raise
