"""A command that waits for hours outlives a restart of the API, and no refusal."""

from http import HTTPStatus
from typing import Any

import pytest

from ops.client.api import CommandError, UnreachableError
from ops.client.polling import reread

AWAY = UnreachableError("http://x cannot be reached")
STARTING = CommandError("the database does not answer (503)", status=HTTPStatus.SERVICE_UNAVAILABLE)


class FakeApi:
    """Answers of one look after the other."""

    def __init__(self, *looks: CommandError | str) -> None:
        self._looks = iter(looks)

    def get(self, _path: str) -> Any:
        look = next(self._looks)
        if isinstance(look, CommandError):
            raise look
        return look


def look(*looks: CommandError | str, patience_s: float = 60.0) -> Any:
    api: Any = FakeApi(*looks)
    return reread(api, "/v1/batches/batch_1", patience_s=patience_s, pause=lambda _: None)


def test_an_api_that_comes_back_is_waited_for_and_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert look(AWAY, STARTING, AWAY, "there") == "there"
    assert capsys.readouterr().err.count("cannot be reached") == 1


def test_an_api_that_stays_away_ends_the_wait() -> None:
    with pytest.raises(UnreachableError):
        look(AWAY, "never asked", patience_s=0.0)


def test_a_refusal_ends_the_wait_at_once() -> None:
    with pytest.raises(CommandError, match="404"):
        look(CommandError("no such batch (404)", status=HTTPStatus.NOT_FOUND), "never asked")
