"""Boards are what their source says, show what exists, and lead to pages and boards that exist."""

import json
import re
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from ops.deploy.boards.all import BOARDS, FOLDER, write_boards
from ops.deploy.boards.board import Board, dashboard
from tests.ops.deploy.exported import exported
from tests.ops.deploy.promql import faults

PAGES = {"overview", "plans", "models", "pools", "batches", "forecasts", "tenants", "nodes", "requests"}
BY_NAME = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)


def loaded(board: Board) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(dashboard(board))
    return made


def test_the_committed_boards_are_what_their_source_says(tmp_path) -> None:
    assert {path.name for path in write_boards(tmp_path)} == {path.name for path in FOLDER.iterdir()}
    for path in FOLDER.iterdir():
        committed = path.read_text(encoding="utf-8")
        assert committed == (tmp_path / path.name).read_text(encoding="utf-8"), f"{path.name}: run `make reference`"
    assert write_boards(tmp_path) == []


@BY_NAME
def test_every_query_asks_for_what_is_exported(board: Board) -> None:
    queries = [expr for panel in board.panels() for expr in panel.queries.values()]
    assert queries
    assert [(expr, fault) for expr in queries for fault in faults(expr, exported())] == []
    for variable in board.variables:
        asked = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable.query)
        assert asked is not None
        assert asked[2] in exported()[asked[1]].labels


def test_times_between_tokens_are_ranked_by_how_far_they_are_from_their_profile_either_way() -> None:
    """Half of what is predicted is as far away as twice, and each GPU type has a profile of its own."""
    [planning] = [board for board in BOARDS if board.name == "planning"]
    [panel] = [each for each in planning.panels() if each.title == "Time between tokens, beside its profile"]
    [(legend, query)] = panel.queries.items()
    ratio, ranked = query.split(" and ")
    assert ranked == f"topk(10, abs(ln({ratio})))"
    assert ratio.startswith("max by (model, region, gpu_type) ")
    assert "{{gpu_type}}" in legend


@BY_NAME
def test_every_panel_has_a_unit_and_says_what_to_do(board: Board) -> None:
    known = {value for name, value in vars(units).items() if isinstance(value, str) and not name.startswith("_")}
    panels = [panel for panel in loaded(board)["panels"] if panel["type"] != "row"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"] in known, panel["title"]
        assert len(re.findall(r"[.:;] ", panel["description"] + " ")) >= 2, f"{panel['title']}: what to do?"
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


@BY_NAME
def test_every_variable_that_is_used_is_offered(board: Board) -> None:
    made = loaded(board)
    offered = {variable["name"] for variable in made["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)\}?", json.dumps(made))) - {"__rate_interval"}
    assert used == offered


@BY_NAME
def test_links_lead_to_the_console_and_keep_the_time(board: Board) -> None:
    made = loaded(board)
    boards, console = made["links"]
    assert (boards["type"], boards["tags"], boards["keepTime"], boards["includeVars"]) == (
        "dashboards",
        made["tags"],
        True,
        True,
    )
    links = [console, *(link for panel in made["panels"] for link in panel.get("links", ()))]
    assert len(links) == 1 + len(list(board.panels()))
    for link in links:
        page = link["url"].removeprefix("${console}/ui/#/")
        assert page in PAGES, link


@BY_NAME
def test_panels_do_not_overlap_and_are_on_the_grid(board: Board) -> None:
    taken: set[tuple[int, int]] = set()
    ids = set()
    for panel in loaded(board)["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        ids.add(panel["id"])
    assert len(ids) == len(loaded(board)["panels"])


@BY_NAME
def test_grafana_reads_all_of_it(board: Board) -> None:
    """What Grafana's own types drop when they read a board would be dropped silently by Grafana too."""
    read = Dashboard.from_json(loaded(board))
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == loaded(board)


def test_what_grafana_is_provisioned_with_fits_the_boards() -> None:
    folder = FOLDER.parent / "grafana"
    [source] = yaml.safe_load((folder / "datasource.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    [provider] = yaml.safe_load((folder / "boards.yaml").read_text())["providers"]
    assert (provider["type"], provider["allowUiUpdates"]) == ("file", False)
