"""Requests that wait in a long queue go to an instance that is idle: the gateway's side of `policies.rerouting`.

A gateway closes the stream from the first instance, which cancels the request there, and sends it again. Nothing is
lost: it had no part of the answer from there, and a token depends on the seed and its position alone.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable

import structlog

from controlplane.policies.rerouting import ReroutingFacts, ReroutingSettings, choose_reroutes, may_reroute
from controlplane.serving.attempts import Attempt
from controlplane.serving.background import in_background
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.send import Sender
from controlplane.settings import Settings

log = structlog.get_logger()
_LOOK_EVERY_S = 1.0
"""As often as nodes report."""


class Rerouter:
    """Moves the requests of one process. `on_move` is told the model and the tier of each that moves."""

    def __init__(
        self, fleet: FleetCache, sender: Sender, settings: Settings, *, on_move: Callable[[str, str], None]
    ) -> None:
        self._fleet = fleet
        self._sender = sender
        self._settings = ReroutingSettings(wait_min_s=settings.reroute_wait_s, stale_s=settings.heartbeat_stale_s)
        self._on_move = on_move

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look for requests to move while the block runs; with `reroute_wait_s` 0 never."""
        if not self._settings.wait_min_s:
            yield
            return
        async with in_background(self._look_forever()):
            yield

    def look(self) -> None:
        """Move what may move now; nothing while no connection is free, which a request that moves gives up first."""
        if self._sender.is_full:
            return
        of_model: dict[str, list[Attempt]] = {}
        for attempt in self._sender.waiting:
            of_model.setdefault(attempt.request.message.model, []).append(attempt)
        for model, attempts in of_model.items():
            instances = self._fleet.instances(model)
            if may_reroute(instances, self._settings):
                waiting = tuple([attempt.facts(str(number)) for number, attempt in enumerate(attempts)])
                facts = ReroutingFacts(
                    instances=instances,
                    waiting=waiting,
                    avoided=self._sender.avoided(),
                    seed=random.getrandbits(32),
                )
                for reroute in choose_reroutes(facts, time.time(), self._settings):
                    attempt = attempts[int(reroute.request_id)]
                    if attempt.move(reroute.route):
                        self._on_move(model, attempt.request.message.tier.value)

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                self.look()
            except Exception:  # a defect stops no later look
                log.exception("waiting requests were not looked at")
