"""The client of commands: every failure is a CommandError of one line."""

import httpx2 as httpx
import pytest

from ops.client.api import Api, CommandError, UnreachableError, open_api


def test_a_number_that_json_does_not_have_is_not_sent() -> None:
    api = Api(httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(lambda _: pytest.fail("sent"))))
    with pytest.raises(CommandError, match="PUT /admin/gpu-types/X cannot be sent: Out of range float"):
        api.put("/admin/gpu-types/X", {"cost_per_hour": float("inf")})


@pytest.mark.parametrize(("host", "asks"), [("127.0.0.1", True), ("localhost", True), ("gateway.example", False)])
def test_an_api_of_this_machine_may_only_be_stopped(host: str, asks: bool) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused", request=request)

    api = Api(httpx.Client(base_url=f"http://{host}:8080", transport=httpx.MockTransport(refuse)))
    with pytest.raises(UnreachableError, match="cannot be reached: Connection refused") as told:
        api.get("/admin/status")
    assert ("is `tidepool up` running?" in str(told.value)) == asks


def test_authorities_that_cannot_be_read_are_named_by_their_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEPOOL_TLS_CA_FILE", "/absent/ca.pem")
    with pytest.raises(CommandError, match="setting TIDEPOOL_TLS_CA_FILE: "), open_api("https://gateway", "key"):
        pass
