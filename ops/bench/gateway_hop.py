"""The bare hop that the gateway is held against: Starlette and httpx2, bytes in, bytes out, nothing looked at.

python -m ops.bench.gateway_hop PORT UPSTREAM_URL
"""

import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator

import httpx2 as httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route


def make_app(upstream: str) -> Starlette:
    """Any POST goes to `upstream`/generate and its answer comes back."""
    client = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=2000, max_keepalive_connections=200))

    async def forward(request: Request) -> StreamingResponse:
        asking = client.build_request("POST", f"{upstream}/generate", content=await request.body())
        answer = await client.send(asking, stream=True)

        async def body() -> AsyncGenerator[bytes, None]:
            try:
                async for data in answer.aiter_raw():
                    yield data
            finally:
                await answer.aclose()

        return StreamingResponse(body(), media_type=answer.headers["content-type"])

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await client.aclose()

    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])], lifespan=lifespan)


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
