"""Emptying an endpoint through the admin API, and waiting for that."""

from collections.abc import Callable
from time import sleep

from ops.client.api import Api, CommandError
from ops.client.screen import notes

POLL_S = 1.0


def drain_endpoint(api: Api, model: str, region: str) -> None:
    """Limit an endpoint to no instances, and wait until none serves.

    Raises:
        CommandError: it does not exist, or is pinned.
    """
    known = [row for row in api.pages("/admin/endpoints")["data"] if (row["model"], row["region"]) == (model, region)]
    if not known:
        raise CommandError(f"endpoint {model} in {region} is not registered")
    pins = [row for row in api.pages("/admin/pins")["data"] if (row["model"], row["region"]) == (model, region)]
    if pins:
        raise CommandError(f"{model} in {region} is pinned: tidepool pin remove {pins[0]['id']}")
    api.put("/admin/endpoints", {"model": model, "region": region, "instances_min": 0, "instances_max": 0})

    def left() -> str | None:
        rows = api.pages("/admin/instances")["data"]
        mine = [row for row in rows if (row["model"], row["region"]) == (model, region) and row["desired"] != "spot"]
        return f"{model} in {region}: {instances_left(len(mine))}" if mine else None

    wait_until_none(left)


def instances_left(count: int) -> str:
    """How many instances still have to go."""
    return f"{count} instance{'s' if count > 1 else ''} left"


def wait_until_none(left: Callable[[], str | None]) -> None:
    """Wait until nothing is left, and report each change once."""
    reported = None
    while (now := left()) is not None:
        if now != reported:
            notes().print(now, markup=False)
            reported = now
        sleep(POLL_S)
