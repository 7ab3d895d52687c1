"""The client of commands: every failure is a CommandError of one line."""

import httpx2 as httpx
import pytest

from ops.client.api import Api, CommandError


def test_a_number_that_json_does_not_have_is_not_sent() -> None:
    api = Api(httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(lambda _: pytest.fail("sent"))))
    with pytest.raises(CommandError, match="PUT /admin/gpu-types/X cannot be sent: Out of range float"):
        api.put("/admin/gpu-types/X", {"cost_per_hour": float("inf")})
