"""What an administrator of a drill counts as promised: only what was answered."""

import asyncio

import httpx2 as httpx

from ops.faults.regional.promises import Administrator, Promises

TURNS = 2


def promised(*, revocations_answered: bool) -> Promises:
    """After two turns at a gateway that carries out every revocation."""
    stop = asyncio.Event()
    made: list[str] = []

    def gateway(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/admin/keys":
            made.append(f"key_{len(made)}")
            return httpx.Response(201, json={"id": made[-1], "secret": f"secret of {made[-1]}"})
        if request.method == "DELETE" and request.url.path.startswith("/admin/keys/"):
            if not revocations_answered:
                raise httpx.ReadTimeout("the answer is lost")
            return httpx.Response(200, json={})
        if request.url.path == "/admin/pins" and len(made) == TURNS:
            stop.set()
        return httpx.Response(200, json={"id": "pin_0"})

    async def run() -> Promises:
        transport = httpx.MockTransport(gateway)
        administrator = Administrator("north", "http://north", "k", "m", transport)
        await asyncio.wait_for(administrator.run(stop), 30)
        return administrator.promises

    return asyncio.run(run())


def test_every_other_key_is_revoked_and_both_are_promises() -> None:
    found = promised(revocations_answered=True)
    assert found.keys == {"north-0": "secret of key_0"}
    assert found.revoked == {"north-1": "secret of key_1"}


def test_a_key_whose_revocation_had_no_answer_is_no_promise() -> None:
    """It may be in effect, as the revocation of a primary that was cut off just then."""
    found = promised(revocations_answered=False)
    assert found.keys == {"north-0": "secret of key_0"}
    assert found.revoked == {}
