"""`tidepool plan` and `tidepool batch` against an API."""

import json
import os
import time
import webbrowser
from pathlib import Path

import pytest

from tests.ops.cli.running import Run


def test_plans_of_an_empty_fleet(served: Run) -> None:
    assert served("plan", "list", "--json").json["data"] == []
    assert "(404)" in served("plan", "show", "plan_0").err
    assert "(404)" in served("plan", "apply", "plan_0", "--index", 1).err
    for act in ("approve", "reject", "rollback"):
        assert "(404)" in served("plan", act, "plan_0").err
    assert "last planned" in served("status").out


def test_a_plan_is_explained_drawn_and_rolled_back(fleet: Run, tmp_path: Path) -> None:
    minute_s = int(time.time()) // 60 * 60
    lines = ["start_s,region,model,tokens_per_s", *(f"{minute_s - 60 * n},us-east,m,{n}" for n in range(1, 90))]
    (tmp_path / "day.csv").write_text("\n".join(lines))
    fleet("demand", "import", tmp_path / "day.csv")
    made = [fleet("plan", "create", "--json").json["plan"]["id"]]
    assert "(409)" in fleet("plan", "rollback", made[0]).err
    assert fleet("plan", "show", "latest", "--json").json["plan"]["id"] == made[0]
    assert "no plan is in force" in fleet("plan", "show", "current").err
    assert fleet("plan", "approve", made[0][:-1]).out == f"plan {made[0]} is in force\n"
    assert fleet("plan", "show", "current", "--json").json["plan"]["id"] == made[0]
    assert "m in all" in fleet("plan", "show", "--explain", made[0].removeprefix("plan_")).out
    assert "Changes: none" in fleet("plan", "show", "latest", "--changes-only").out
    told = fleet("plan", "show", "--explain", made[0]).out
    assert "What was expected\n  1 endpoint from" in told
    assert "- m in all regions: " in told, "there is no node, and so no place"
    drawn = fleet("plan", "plot", made[0], tmp_path / "plan.png", "--json").json
    assert (drawn["drawn"], drawn["endpoints"]) == (1, 1)
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert "no endpoint" in fleet("plan", "plot", made[0], tmp_path / "plan.png", "--model", "x").err
    assert "must end in" in fleet("plan", "plot", made[0], tmp_path / "plan.doc").err
    made.append(fleet("plan", "create", "--json").json["plan"]["id"])
    assert fleet("plan", "reject", made[1], "--note", "no", "--json").json["plan"]["state"] == "rejected"
    made.append(fleet("plan", "create", "--json").json["plan"]["id"])
    assert fleet("plan", "apply", made[2]).status == 0
    back = fleet("plan", "rollback", made[2], "--note", "too few").out
    assert f"takes back plan {made[2]}" in back
    restored = back.split()[1]
    assert "Approved by admin" in fleet("plan", "show", "--explain", restored).out
    problem = json.loads(fleet("plan", "inputs", "--problem", made[2]).out)
    assert problem["regions"] == ["us-east"]


def test_a_plan_in_the_browser(fleet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert "no plan is in force" in fleet("plan", "show", "--web").err
    plan_id = fleet("plan", "create", "--json").json["plan"]["id"]
    link = f"{os.environ['TIDEPOOL_URL']}/ui/#/plans/{plan_id}"
    assert fleet("plan", "show", "latest", "--web").out == f"{link}\n"
    assert opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    fleet("plan", "approve", plan_id)
    assert fleet("plan", "show", "--web").out == f"{link}\n"
    assert opened == [link]


def test_batches(fleet: Run, tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    file = tmp_path / "requests.jsonl"
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file.write_text(json.dumps(request) + "\n")
    batch = fleet("batch", "submit", file, "--no-watch", "--json").json
    assert batch["status"] == "validating"
    assert batch["id"] in fleet("batch", "list").out
    for given in (batch["id"], batch["id"][:-1], "latest"):
        assert fleet("batch", "show", given, "--json").json["id"] == batch["id"], given
    assert "has no output file" in fleet("batch", "output", batch["id"]).err
    assert fleet("batch", "cancel", batch["id"], "--json").json["status"] in {"cancelling", "cancelled"}
    file.write_text("{}\n")
    assert "url" in fleet("batch", "submit", file).err
    file.write_text("no json\n")
    assert "line 1" in fleet("batch", "submit", file).err
