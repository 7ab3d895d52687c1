"""Ids by their first characters, `latest` and `current`."""

from typing import Any

import pytest

from ops.cli.ids import whole_id
from ops.client.api import CommandError

IDS = [f"{number:032x}" for number in (0x10, 0x11, 0x2000, 0xABC << 112)]


class FakeApi:
    """Lists as the API does: a page after a cursor, in the order of the ids, or the newest first."""

    def __init__(self, kind: str, *, newest_first: bool, current: str | None = None) -> None:
        self.ids = sorted((f"{kind}_{one}" for one in IDS), reverse=newest_first)
        self._newest_first, self._current = newest_first, current

    def get(self, path: str, *, limit: int = 20, after: str | None = None, **_: Any) -> Any:
        if path == "/admin/status":
            return {"plan": None if self._current is None else {"id": self._current}}
        rest = [one for one in self.ids if after is None or (one < after if self._newest_first else one > after)]
        return {"data": [{"id": one} for one in rest[:limit]]}


@pytest.mark.parametrize(
    ("kind", "newest_first"),
    [("plan", True), ("batch", True), ("whatif", True), ("key", False), ("pin", False), ("inst", False)],
)
def test_an_id_is_found_by_its_first_characters(kind: str, newest_first: bool) -> None:
    api: Any = FakeApi(kind, newest_first=newest_first)
    for given in (f"{kind}_0abc", "0abc", f"{kind}_{IDS[3]}"):
        assert whole_id(api, kind, given) == f"{kind}_{IDS[3]}", given
    unknown = "f" * 32
    assert whole_id(api, kind, unknown) == f"{kind}_{unknown}", "a whole id is not looked up"
    assert whole_id(api, kind, "0f00") == "0f00", "the API says that there is none"
    assert whole_id(api, kind, "../x") == "../x"
    with pytest.raises(CommandError, match="is not one") as refused:
        whole_id(api, kind, f"{kind}_{'0' * 30}")
    assert [line.strip() for line in str(refused.value).splitlines()[1:]] == sorted(
        (f"{kind}_{IDS[0]}", f"{kind}_{IDS[1]}"), reverse=newest_first
    )


def test_many_matches_are_not_all_listed() -> None:
    api: Any = FakeApi("plan", newest_first=True)
    api.ids = [f"plan_{number:032x}" for number in range(40, 0, -1)]
    with pytest.raises(CommandError) as refused:
        whole_id(api, "plan", "0")
    assert len(str(refused.value).splitlines()) == 12
    assert str(refused.value).endswith("...")


def test_latest_and_current() -> None:
    api: Any = FakeApi("plan", newest_first=True, current="plan_x")
    assert whole_id(api, "plan", "latest") == f"plan_{IDS[3]}"
    assert whole_id(api, "plan", "current") == "plan_x"
    assert whole_id(api, "batch", "current") == "current"
    assert whole_id(api, "key", "latest") == "latest"
    with pytest.raises(CommandError, match="no plan is in force"):
        whole_id(FakeApi("plan", newest_first=True), "plan", "current")  # type: ignore[arg-type]
    api.ids = []
    with pytest.raises(CommandError, match="no batch yet"):
        whole_id(api, "batch", "latest")
