"""`events --follow`: each event once, the oldest first, whatever the order in which transactions end."""

from typing import Any

import pytest

from ops.cli.events import follow_events
from ops.client.api import CommandError


def _row(number: int) -> dict[str, Any]:
    row = {"id": number, "at": "2026-11-22T10:00:00Z", "kind": "instance", "what": "ready", "subject": f"inst_{number}"}
    return row | {"model": "m", "region": "us-east", "node": "n1", "message": None}


class FakeApi:
    """Answers of one look after the other; a number is an event's id."""

    def __init__(self, *looks: list[int] | CommandError) -> None:
        self._looks = iter(looks)

    def get(self, path: str, **_: Any) -> Any:
        look = next(self._looks, None)
        if look is None:
            raise KeyboardInterrupt
        if isinstance(look, CommandError):
            raise look
        return {"data": [_row(number) for number in look], "has_more": False}


def test_each_event_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    away = CommandError("http://x cannot be reached")
    api: Any = FakeApi([4, 2, 1], away, away, [5, 4, 3, 2, 1], [5, 4, 3, 2, 1])
    follow_events(api, [_row(2), _row(1)], {}, pause=lambda _: None)
    shown = capsys.readouterr()
    assert [line.split()[3] for line in shown.out.splitlines()] == [f"inst_{number}" for number in (1, 2, 4, 3, 5)]
    assert shown.out.startswith("2026-11-22 10:00:00Z instance inst_1 ready (m, us-east, n1)\n")
    assert shown.err.count("cannot be reached") == 1
