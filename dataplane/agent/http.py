"""The agent's HTTP server: /generate streams tokens, /tokenize and /detokenize convert them; /livez, /readyz, /metrics
and /state are for operators; /hosts is for the followers of slots that several hosts have.

All but /livez, /readyz and /metrics require `Authorization: Bearer <node key>`. A refusal is a `Failed` message with
its HTTP status.
"""

import hmac
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn import Config

from dataplane.agent.answer_streams import AnswerStream, Encode, encoder, parts
from dataplane.agent.answers import Answer, failed_event
from dataplane.agent.metrics import agent_registry
from dataplane.agent.node import Agent
from dataplane.agent.pooled_answers import PooledAnswer
from dataplane.agent.state import node_state
from dataplane.protocol.connections import WritableConnection, body_writer
from dataplane.protocol.errors import BadRequestError, DataplaneError
from dataplane.protocol.messages import Detokenize, Generate, Tokenize
from dataplane.runtime.tracing import admitting
from dataplane.worker.hosts import HostReport

_HEAD_BYTES_MAX = 65_536
_CLIENT_GONE = 499
"""The status, as of nginx, of a request whose client is gone before its body was read. Nobody receives it."""
Endpoint = Callable[[Request], Awaitable[Response]]

Message = TypeVar("Message")

_generate_decoder = msgspec.json.Decoder(Generate)
_tokenize_decoder = msgspec.json.Decoder(Tokenize)
_detokenize_decoder = msgspec.json.Decoder(Detokenize)
_host_report_decoder = msgspec.json.Decoder(HostReport)


class UnauthorizedError(DataplaneError):
    """No node key, or another one."""

    status = 401
    code = "invalid_node_key"


class BodyTooLargeError(DataplaneError):
    """A body beyond the limit."""

    status = 413
    code = "request_too_large"


class AnswerResponse(StreamingResponse):
    """The stream of an answer. Its end, by a disconnected client too, ends the request in the worker."""

    def __init__(self, answer: Answer | PooledAnswer, media_type: str, encode: Encode) -> None:
        super().__init__(parts(answer, encode), media_type=media_type)
        self._answer = answer
        self._encode = encode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, body = self._answer, body_writer(scope)
        try:
            if body is None or isinstance(answer, PooledAnswer):
                await super().__call__(scope, receive, send)
            else:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await AnswerStream(answer, self._encode, body).run()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            answer.close()


class AgentApi:
    """The endpoints of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._registry = agent_registry(agent)
        self._authorization = f"Bearer {agent.settings.inbound_key}".encode()

    async def generate(self, request: Request) -> Response:
        """POST a Generate; the answer is a stream of events, one JSON object a line, or of records."""
        self._authorize(request)
        generate = await self._read(request, _generate_decoder)
        structlog.contextvars.bind_contextvars(request_id=generate.request_id)  # this request's task has them alone
        with admitting(request.headers, generate):
            media_type, encode = encoder(generate, request.headers.get("accept", ""))
            return AnswerResponse(await self._agent.admit(generate), media_type, encode)

    async def tokenize(self, request: Request) -> Response:
        """POST a Tokenize; the answer is a Tokenized."""
        self._authorize(request)
        answer = await self._agent.tokenize(await self._read(request, _tokenize_decoder))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """POST a Detokenize; the answer is a Detokenized."""
        self._authorize(request)
        answer = await self._agent.detokenize(await self._read(request, _detokenize_decoder))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def state(self, request: Request) -> Response:
        """GET the document of `dataplane.agent.state`."""
        self._authorize(request)
        document = node_state(self._agent, time.monotonic())
        return Response(msgspec.json.encode(document), media_type="application/json")

    async def hosts(self, request: Request) -> Response:
        """POST a HostReport; the answer is HostOrders."""
        key = self._agent.settings.node_key.get_secret_value()
        if not hmac.compare_digest(_offered(request), f"Bearer {key}".encode()):
            raise UnauthorizedError("wrong node key: TIDEPOOL_AGENT_NODE_KEY must be the same on all hosts of a node")
        report = await self._read(request, _host_report_decoder)
        hosts = next((one.hosts for one in self._agent.workers if one.index == report.slot), None)
        if hosts is None:
            raise BadRequestError(f"slot {report.slot} of this node is not of several hosts", param="slot")
        orders = hosts.receive(report, request.scope["server"][0])
        return Response(msgspec.json.encode(orders), media_type="application/json")

    async def livez(self, request: Request) -> Response:
        """GET whether the event loop runs."""
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        """GET whether the agent has started (`Agent.has_started`), so that the next one may be replaced."""
        if self._agent.has_started:
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not joined, or instances are still loading: see /state\n", status_code=503)

    async def metrics(self, request: Request) -> Response:
        """GET the metrics in Prometheus' text format."""
        text = generate_latest(self._registry)
        self._agent.drop_measures()
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    def _authorize(self, request: Request) -> None:
        if not hmac.compare_digest(_offered(request), self._authorization):
            raise UnauthorizedError(
                "wrong node key: TIDEPOOL_NODE_KEY of the control plane must be TIDEPOOL_AGENT_FLEET_KEY of the node,"
                " or its TIDEPOOL_AGENT_NODE_KEY where it has none"
            )

    async def _read(self, request: Request, decoder: msgspec.json.Decoder[Message]) -> Message:
        limit, body = self._agent.settings.body_bytes_max, bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise BodyTooLargeError(f"the body is over {limit} bytes")
        try:
            return decoder.decode(body)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the body is no {decoder.type.__name__} message: {error}") from error


def _offered(request: Request) -> bytes:
    return request.headers.get("authorization", "").encode()


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, DataplaneError)
    return Response(msgspec.json.encode(failed_event(error)), status_code=error.status, media_type="application/json")


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


def make_app(agent: Agent) -> Starlette:
    """The ASGI app of an agent, which the caller runs."""
    api = AgentApi(agent)
    routes = [
        Route("/generate", api.generate, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/state", api.state, methods=["GET"]),
        Route("/hosts", api.hosts, methods=["POST"]),
        Route("/livez", api.livez, methods=["GET"]),
        Route("/readyz", api.readyz, methods=["GET"]),
        Route("/metrics", api.metrics, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={DataplaneError: _refuse, ClientDisconnect: _on_disconnect})


def server_config(agent: Agent) -> Config:
    """The configuration of an agent's server."""
    settings = agent.settings
    return Config(
        make_app(agent),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=partial(  # type: ignore[arg-type]
            WritableConnection, reading_s=settings.unread_time_max_s, head_bytes_max=_HEAD_BYTES_MAX
        ),
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
    )
