from pathlib import Path
from typing import Any

import pytest

from ops.simulator.scenario.changes import ChangeError, with_settings, with_trace

DOCUMENT: dict[str, Any] = {
    "traffic": {"kind": "generated", "rate_per_s": 3, "origins": {"east": 1}},
    "fleet": {"instances": [{"count": 1}, {"count": 2}]},
}


def test_keys_are_set_in_tables_and_lists() -> None:
    changed = with_settings(
        DOCUMENT, ["fleet.instances.1.count=5", "policy.order=edf", "traffic.tiers={ IW-F = 2 }", "traffic.cv=1.5"]
    )
    assert changed["fleet"]["instances"] == [{"count": 1}, {"count": 5}]
    assert changed["policy"] == {"order": "edf"}
    assert changed["traffic"]["tiers"] == {"IW-F": 2}
    assert changed["traffic"]["cv"] == 1.5
    assert DOCUMENT["fleet"]["instances"][1]["count"] == 2


def test_a_trace_keeps_what_both_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    traffic = with_trace(DOCUMENT, "mooncake:a:b.jsonl")["traffic"]
    assert traffic == {"kind": "mooncake", "path": str(tmp_path / "a:b.jsonl"), "origins": {"east": 1}}


@pytest.mark.parametrize("trace", ["mooncake", "mooncake:", "frob:x.csv"])
def test_an_unknown_trace_is_refused(trace: str) -> None:
    with pytest.raises(ChangeError, match="must be FORMAT:PATH, with one of aegaeon, azure-2023"):
        with_trace(DOCUMENT, trace)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("seed", "must be KEY=VALUE"),
        ("a..b=1", "must be KEY=VALUE"),
        ("fleet.instances.2.count=1", "2 is no place in a list of 2"),
        ("traffic.kind.x=1", "x is below a value that is no table"),
    ],
)
def test_a_change_that_leads_nowhere_is_named(setting: str, said: str) -> None:
    with pytest.raises(ChangeError, match=f"--set {setting}: .*{said}"):
        with_settings(DOCUMENT, [setting])
