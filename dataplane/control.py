"""The agent's link to the control plane: joins, heartbeats each second, follows the desired state that comes back.

While the control plane is away the node serves what it has; the link tries again with a growing pause. Proxies named
in the environment are not used: nodes and control plane share a network.
"""

import asyncio
import time

import httpx2 as httpx
import msgspec
import structlog

from dataplane.errors import StaleGenerationError
from dataplane.messages import DesiredInstances, Join, SlotSpec
from dataplane.node import Agent
from dataplane.settings import AgentSettings

log = structlog.get_logger()

BACKOFF_MIN_S = 0.1

_desired_decoder: msgspec.json.Decoder[DesiredInstances] = msgspec.json.Decoder(DesiredInstances)


def join_message(agent: Agent, url: str) -> Join:
    """How a node introduces itself. `url` is where the control plane reaches it."""
    settings = agent.settings
    return Join(
        node=settings.node,
        region=settings.region,
        gpu_type=settings.gpu_type,
        url=url,
        slots=slot_specs(settings),
        engine=settings.engine,
        host_bytes=agent.host_bytes,
    )


def slot_specs(settings: AgentSettings) -> tuple[SlotSpec, ...]:
    """The slots of a node as the control plane knows them: one for each pool, in the pools' order."""
    pools = ([settings.slots[index] for index in indices] for indices in settings.pools())
    return tuple(
        SlotSpec(
            gpus=sum(slot.gpus for slot in pool),
            memory_bytes=sum(slot.memory_bytes for slot in pool),
            workers=len(pool),
        )
        for pool in pools
    )


class UnknownNodeError(Exception):
    """The control plane does not know this node: it must join again."""


class ControlLink:
    """One agent's link. `url` is where the control plane reaches the agent; `transport` replaces the network."""

    def __init__(self, agent: Agent, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._agent = agent
        self._url = url
        self._settings = agent.settings
        self._transport = transport
        self._away = False

    async def run(self) -> None:
        """Join and heartbeat until cancelled."""
        async with httpx.AsyncClient(
            base_url=self._settings.control_url,
            headers={
                "authorization": f"Bearer {self._settings.node_key.get_secret_value()}",
                "content-type": "application/json",
            },
            timeout=self._settings.control_timeout_s,
            transport=self._transport,
            trust_env=False,
        ) as client:
            while True:
                await self._join(client)
                await self._heartbeat_until_unknown(client)

    async def _join(self, client: httpx.AsyncClient) -> None:
        settings, join = self._settings, join_message(self._agent, self._url)
        backoff_s = BACKOFF_MIN_S
        while True:
            try:
                response = await client.post("/node/join", content=msgspec.json.encode(join))
                response.raise_for_status()
            except httpx.HTTPError as error:
                self._note_away(error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, settings.control_backoff_max_s)
            else:
                self._note_back()
                log.info("joined", node=settings.node, control=settings.control_url)
                return

    async def _heartbeat_until_unknown(self, client: httpx.AsyncClient) -> None:
        backoff_s = BACKOFF_MIN_S
        while True:
            self._agent.changed.clear()
            started_s = time.monotonic()
            try:
                await self._heartbeat(client)
            except UnknownNodeError:
                log.warning("the control plane does not know this node; joining again", node=self._settings.node)
                self._agent.forget_generation()
                await asyncio.sleep(BACKOFF_MIN_S)
                return
            except (httpx.HTTPError, msgspec.DecodeError) as error:
                self._note_away(error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._settings.control_backoff_max_s)
            else:
                self._note_back()
                backoff_s = BACKOFF_MIN_S
                await self._pause(started_s)

    async def _heartbeat(self, client: httpx.AsyncClient) -> None:
        response = await client.post("/node/heartbeat", content=msgspec.json.encode(self._agent.heartbeat()))
        if response.status_code == httpx.codes.NOT_FOUND:
            raise UnknownNodeError
        response.raise_for_status()
        try:
            self._agent.apply(_desired_decoder.decode(response.content))
        except StaleGenerationError as error:
            log.warning("stale desired state refused", error=error.message)

    async def _pause(self, started_s: float) -> None:
        """Wait for the next heartbeat's time; a change of state shortens that, down to the least gap."""
        remaining_s = started_s + self._settings.heartbeat_every_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, remaining_s)):  # wait_for of Python 3.11 can swallow a cancellation
                await self._agent.changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(max(0.0, started_s + self._settings.heartbeat_gap_s - time.monotonic()))

    def _note_away(self, error: Exception) -> None:
        if not self._away:
            log.warning("the control plane is away", error=f"{type(error).__name__}: {error}")
        self._away = True

    def _note_back(self) -> None:
        if self._away:
            log.info("the control plane is back")
        self._away = False
