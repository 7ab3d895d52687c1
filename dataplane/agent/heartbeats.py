"""The agent's link to the control plane: it joins, sends a heartbeat each second, and follows the desired state that is
the answer.

While the control plane is unreachable or refuses the node, the node serves the instances that it has; the link tries
again with backoff, and logs which of the two it is. Proxies named in the environment are not used.
"""

import asyncio
import time
from importlib.metadata import PackageNotFoundError, version

import httpx2 as httpx
import msgspec
import structlog

from dataplane.agent.node import Agent
from dataplane.agent.settings import AgentSettings
from dataplane.engines.vllm.version import installed_version
from dataplane.protocol.errors import StaleGenerationError
from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.messages import DesiredInstances, EngineKind
from dataplane.protocol.tls import client_context
from dataplane.protocol.version import tidepool_version

log = structlog.get_logger()

BACKOFF_MIN_S = 0.1


def join_message(agent: Agent, url: str) -> Join:
    """The message by which a node joins. `url` is where the control plane reaches it."""
    settings = agent.settings
    return Join(
        node=settings.node,
        region=settings.region,
        gpu_type=settings.gpu_type,
        url=url,
        slots=slot_specs(settings),
        engine=settings.engine,
        host_bytes=agent.host_bytes,
        dtype=None if settings.engine == "replay" else settings.dtype,
        version=tidepool_version(),
        engine_version=_engine_version(settings.engine),
        regroups=settings.regroup,
    )


def _engine_version(engine: EngineKind) -> str | None:
    """Of vLLM or torch; a replay is Tidepool's own."""
    if engine == "vllm":
        return installed_version()
    try:
        return version("torch") if engine == "torch" else None
    except PackageNotFoundError:
        return None


def slot_specs(settings: AgentSettings) -> tuple[SlotSpec, ...]:
    """The slots of a node as the control plane knows them: one for each worker group, in order."""
    groups = ([settings.slots[index] for index in indices] for indices in settings.groups)
    return tuple(
        SlotSpec(
            number=number if settings.regroup else None,
            gpus=sum(worker.gpus for worker in group),
            memory_bytes=sum(worker.memory_bytes for worker in group),
            workers=len(group),
            hosts=max(worker.hosts for worker in group),
            weights_bytes=max(1, min(settings.weights_bytes(worker) for worker in group)),
        )
        for number, group in zip(settings.numbers, groups, strict=True)
    )


class UnknownNodeError(Exception):
    """The control plane does not know this node: it must join again."""


class RefusedError(Exception):
    """The control plane refuses. The message is its own; `change` tells what to do about it."""

    def __init__(self, message: str, *, status: int, change: str) -> None:
        super().__init__(message)
        self.status = status
        self.change = change


class Problem(msgspec.Struct, frozen=True):
    """The body of a refusal by the control plane (RFC 9457)."""

    detail: str
    param: str | None = None


_desired_decoder: msgspec.json.Decoder[DesiredInstances] = msgspec.json.Decoder(DesiredInstances)
_problem_decoder: msgspec.json.Decoder[Problem] = msgspec.json.Decoder(Problem)
_SETTINGS = {
    "node": "TIDEPOOL_AGENT_NODE",
    "region": "TIDEPOOL_AGENT_REGION",
    "gpu_type": "TIDEPOOL_AGENT_GPU_TYPE",
    "url": "TIDEPOOL_AGENT_ADVERTISE_URL",
    "slots": "TIDEPOOL_AGENT_SLOTS",
}
"""The setting of each field of the join message."""
_TRANSIENT = frozenset({httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS})
_REGISTER = {"region": "tidepool region add NAME", "gpu_type": "tidepool gpu add NAME"}


def refusal(response: httpx.Response, settings: AgentSettings) -> RefusedError | None:
    """Why the control plane refuses this node, and what would change that; None for other answers, transient errors
    (5xx, 408, 429, and what may be tried again) included.
    """
    status = response.status_code
    if not response.is_client_error or status in _TRANSIENT or response.headers.get("x-should-retry") == "true":
        return None
    try:
        problem = _problem_decoder.decode(response.content)
    except msgspec.DecodeError:
        change = f"TIDEPOOL_AGENT_CONTROL_URL must be the address of a tidepool api; it is {settings.control_url}"
        return RefusedError(
            f"the answer is no answer of Tidepool: {response.reason_phrase}", status=status, change=change
        )
    return RefusedError(problem.detail, status=status, change=_change(status, problem, settings))


def _change(status: int, problem: Problem, settings: AgentSettings) -> str:
    """What an operator can do about a refusal."""
    if status in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        made = f"tidepool key create NAME --role node --node {settings.node}"
        return f"set TIDEPOOL_AGENT_NODE_KEY to a key made by: {made}"
    setting = _SETTINGS.get(problem.param or "")
    if setting is None:
        return "the agent and the control plane may be of different versions"
    if status == httpx.codes.NOT_FOUND and problem.param in _REGISTER:
        return f"run {_REGISTER[problem.param]}, or change {setting}"
    return f"change {setting}"


class ControlLink:
    """One agent's link. `url` is where the control plane reaches the agent; tests replace `transport`."""

    def __init__(self, agent: Agent, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._agent = agent
        self._url = url
        self._settings = agent.settings
        self._transport = transport
        self._problem: str | None = None
        """The problem that was logged last, since each is logged once; None while the link works."""

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
            verify=client_context(self._settings.tls_ca_file),
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
                self._check(response)
            except (httpx.HTTPError, RefusedError) as error:
                self._note_problem(error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, settings.control_backoff_max_s)
            else:
                self._note_recovery()
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
            except (httpx.HTTPError, msgspec.DecodeError, RefusedError) as error:
                self._note_problem(error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._settings.control_backoff_max_s)
            else:
                self._note_recovery()
                backoff_s = BACKOFF_MIN_S
                await self._pause(started_s)

    async def _heartbeat(self, client: httpx.AsyncClient) -> None:
        closing = self._agent.closing
        response = await client.post("/node/heartbeat", content=msgspec.json.encode(self._agent.heartbeat()))
        if response.status_code == httpx.codes.NOT_FOUND:
            raise UnknownNodeError
        self._check(response)
        if closing:
            self._agent.said_closing.set()
        try:
            self._agent.apply(_desired_decoder.decode(response.content))
        except StaleGenerationError as error:
            log.warning("stale desired state refused", error=error.message)

    async def _pause(self, started_s: float) -> None:
        """Wait until the next heartbeat is due; a change of state shortens the wait, down to `heartbeat_gap_s`."""
        remaining_s = started_s + self._settings.heartbeat_every_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, remaining_s)):  # wait_for of Python 3.11 can swallow a cancellation
                await self._agent.changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(max(0.0, started_s + self._settings.heartbeat_gap_s - time.monotonic()))

    def _check(self, response: httpx.Response) -> None:
        """Raise RefusedError if the control plane refuses this node, HTTPStatusError if it cannot answer."""
        if (refused := refusal(response, self._settings)) is not None:
            raise refused
        response.raise_for_status()

    def _note_problem(self, error: Exception) -> None:
        if isinstance(error, RefusedError):
            problem = f"refused: {error}"
            if problem != self._problem:
                facts = {"node": self._settings.node, "status": error.status, "change": error.change}
                log.error("the control plane refuses this node", reason=str(error), **facts)
        else:
            problem = "away"
            if problem != self._problem:
                log.warning("the control plane is away", error=_text_of(error), control=self._settings.control_url)
        self._problem = problem

    def _note_recovery(self) -> None:
        if self._problem is not None:
            log.info("the control plane is back")
        self._problem = None


def _text_of(error: Exception) -> str:
    """An error for the log; where the control plane answered, the answer's detail."""
    if isinstance(error, httpx.HTTPStatusError):
        try:
            return f"{error.response.status_code}: {_problem_decoder.decode(error.response.content).detail}"
        except msgspec.DecodeError:
            return f"{error.response.status_code} {error.response.reason_phrase}"
    return f"{type(error).__name__}: {error}"
