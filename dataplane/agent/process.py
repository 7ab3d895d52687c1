"""The agent process: one node with its HTTP server, its workers and its link to the control plane."""

import asyncio
import contextlib
import signal
import socket
import uuid
from collections.abc import Iterator

import structlog
import uvicorn
import uvloop

from dataplane.agent.heartbeats import ControlLink
from dataplane.agent.http import server_config
from dataplane.agent.node import Agent
from dataplane.agent.settings import AgentSettings

log = structlog.get_logger()

HANDOVER_DECIDED_S = 3.0
"""A control plane that has started no successor within this time has no capacity for one."""
CLOSING_S = 1.0
"""Until gateways have read the heartbeat that says that no instance of this node takes requests any more."""


class AgentServer(uvicorn.Server):
    """A uvicorn server that leaves the signals to the agent, which has workers to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_agent(settings: AgentSettings) -> None:
    """Run a node's agent until SIGTERM or SIGINT; then say that it leaves, let streams end, and stop the workers.
    SIGTERM first waits for successors of its instances on other nodes, as far as these have capacity.
    """
    uvloop.run(_serve_agent(settings))


async def _serve_agent(settings: AgentSettings) -> None:
    stopping, leaving = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, leaving.set)
    loop.add_signal_handler(signal.SIGINT, stopping.set)
    listener = socket.create_server((settings.host, settings.port), backlog=1024)  # its port is known from here on
    scheme = "https" if settings.tls_cert_file else "http"
    url = settings.advertise_url or f"{scheme}://{settings.host}:{listener.getsockname()[1]}"
    agent = Agent(settings, boot_id=uuid.uuid4().hex)
    server = AgentServer(server_config(agent))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    workers = asyncio.create_task(agent.run())  # first, since the node joins with the host memory that it found
    linked = asyncio.create_task(ControlLink(agent, url).run())
    log.info("agent started", node=settings.node, url=url, workers=len(settings.slots), engine=settings.engine)
    stop = asyncio.create_task(_hand_over(agent, stopping, max_s=0.0))
    handed_over = asyncio.create_task(_hand_over(agent, leaving, max_s=settings.handover_max_s))
    try:
        done, _ = await asyncio.wait({serving, linked, workers, stop, handed_over}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        log.info("agent stopping", node=settings.node)
        server.should_exit = True
        linked.cancel()
        await asyncio.wait({serving, linked})
        for task in (workers, stop, handed_over):
            task.cancel()
        await asyncio.gather(workers, linked, stop, handed_over, return_exceptions=True)
        listener.close()


async def _hand_over(agent: Agent, leaving: asyncio.Event, *, max_s: float) -> None:
    """On a signal: wait at most `max_s` for successors on other nodes, then until gateways send nothing more to this
    one: the control plane hears so within `control_timeout_s`, or is away.
    """
    await leaving.wait()
    log.info("handing over", node=agent.settings.node, max_s=max_s)
    await agent.hand_over(decided_s=HANDOVER_DECIDED_S, max_s=max_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(agent.settings.control_timeout_s):
            await agent.said_closing.wait()
    await asyncio.sleep(CLOSING_S)
