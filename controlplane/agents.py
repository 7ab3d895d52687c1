"""The HTTP client to node agents: one request, one stream of events."""

from collections.abc import AsyncGenerator

import httpx2 as httpx
import msgspec

from controlplane.errors import NodeError
from controlplane.settings import Settings
from dataplane.messages import Failed, Generate, StreamEvent, decode_line

_CONNECT_TIMEOUT_S = 2.0


class AgentClient:
    """Keeps connections to agents open between requests."""

    def __init__(self, settings: Settings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        idle_s = max(settings.first_token_timeout_s, settings.stream_idle_timeout_s)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(idle_s, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=2000, max_keepalive_connections=200),
            headers={"Authorization": f"Bearer {settings.node_key.get_secret_value()}"},
            transport=transport,
            trust_env=False,  # nodes are ours: no proxy stands between
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def generate(self, url: str, request: Generate) -> AsyncGenerator[StreamEvent, None]:
        """The events of one request. Leaving the iteration early drops the request on the node.

        Raises:
            NodeError: the node refused, broke off, or cannot be reached; `retryable` says whether another may do.
        """
        body = msgspec.json.encode(request)
        try:
            async with self._client.stream("POST", f"{url}/generate", content=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(await response.aread(), response.status_code)
                async for line in response.aiter_lines():
                    event = decode_line(line)
                    if isinstance(event, Failed):
                        raise _error_of(event)
                    yield event
        except httpx.HTTPError as error:
            raise NodeError(f"the node at {url} broke off: {error or type(error).__name__}") from error
        except msgspec.DecodeError as error:
            raise NodeError(f"the node at {url} speaks another protocol: {error}") from error


def _refusal(body: bytes, status: int) -> NodeError:
    try:
        return _error_of(msgspec.json.decode(body, type=Failed))
    except msgspec.DecodeError:
        return NodeError(f"the node answered {status}", retryable=status >= 500)


def _error_of(event: Failed) -> NodeError:
    return NodeError(event.message, status=event.status, code=event.code, param=event.param, retryable=event.retryable)
