"""The bare hop that the gateway is held against: Starlette and aiohttp, bytes in, bytes out, nothing looked at.

python -m ops.bench.gateway.hop PORT UPSTREAM_URL
"""

import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route


def make_app(upstream: str) -> Starlette:
    """Any POST goes to `upstream`/generate and its answer comes back."""
    clients: list[aiohttp.ClientSession] = []

    async def forward(request: Request) -> StreamingResponse:
        answer = await clients[0].post(f"{upstream}/generate", data=await request.body())

        async def body() -> AsyncGenerator[bytes, None]:
            async with answer:
                async for data in answer.content.iter_any():
                    yield data

        return StreamingResponse(body(), media_type=answer.headers["content-type"])

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=60)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=2000), timeout=timeout) as client:
            clients.append(client)
            yield

    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])], lifespan=lifespan)


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
