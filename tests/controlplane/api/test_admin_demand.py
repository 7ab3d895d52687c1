"""Importing demand: all of a file or nothing of it."""

from typing import Any

import pytest

from controlplane.settings import Settings
from controlplane.store.demand import DemandBucket
from controlplane.store.session import Database
from tests.controlplane.api.conftest import Ask

HEADER = "start_s,region,model,tokens_per_s\n"
DAY_S = 1_731_283_200


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"file_bytes_max": 8 * 2**20})


def _import(ask: Ask, content: str | bytes, status: int = 200, **request: Any) -> Any:
    return ask("POST", "/admin/demand", content=content, status=status, **request)


def _rows(database: Database) -> int:
    with database.transaction() as session:
        return session.query(DemandBucket).count()


def _points(ask: Ask, **query: Any) -> list[tuple[int, float]]:
    answer = ask("GET", "/admin/demand", role="viewer", params={"model": "llama", "region": "us-east"} | query)
    return [(point["start_s"], point["tokens_per_s"]) for point in answer["data"]]


def test_a_file_is_imported_and_read_back(ask: Ask, fleet: None) -> None:
    lines = [f"{DAY_S + 60 * i},us-east,llama,{i / 2}" for i in range(5)]
    lines[2] = f"{DAY_S + 120},us-east,llama,"
    lines.append(f"{DAY_S},us-west,Qwen/Qwen3-8B,7")
    imported = _import(ask, HEADER + "\n".join(lines))
    assert imported == {"rows": 5, "series": 2, "first_s": DAY_S, "last_s": DAY_S + 240}
    assert _points(ask) == [(DAY_S, 0.0), (DAY_S + 60, 0.5), (DAY_S + 180, 1.5), (DAY_S + 240, 2.0)]
    assert _points(ask, since_s=DAY_S + 60, until_s=DAY_S + 240) == [(DAY_S + 60, 0.5), (DAY_S + 180, 1.5)]
    assert _points(ask, kind="NIW") == []
    event = ask("GET", "/admin/audit", params={"limit": 1})["data"][0]
    assert (event["action"], event["after"]) == ("demand.import", imported)


def test_columns_may_come_in_any_order_and_minutes_are_replaced(ask: Ask, fleet: None, database: Database) -> None:
    _import(ask, f"model,tokens_per_s,start_s,region,note\r\nllama,1,{DAY_S},us-east,x\r\n")
    _import(ask, f"{HEADER}{DAY_S},us-east,llama,2\n{DAY_S},us-east,llama,3\n")
    assert _points(ask) == [(DAY_S, 3.0)]
    assert _rows(database) == 1


def test_demand_of_what_is_not_registered_is_no_empty_list(ask: Ask, fleet: None) -> None:
    for unknown in ("model", "region"):
        query = {"model": "llama", "region": "us-east"} | {unknown: "ghost"}
        refused = ask("GET", "/admin/demand", params=query, status=404)
        assert (refused["detail"], refused["param"]) == (f"{unknown} 'ghost' is not registered", unknown)


BAD_LINES: tuple[tuple[str, str | None], ...] = (
    ("60,mars,llama,1", "region"),
    ("60,us-east,mars,1", "model"),
    ("61,us-east,llama,1", "start_s"),
    ("-60,us-east,llama,1", "start_s"),
    ("noon,us-east,llama,1", "start_s"),
    ("1e300,us-east,llama,1", "start_s"),
    ("nan,us-east,llama,1", "start_s"),
    ("60,us-east,llama,-1", "tokens_per_s"),
    ("60,us-east,llama,inf", "tokens_per_s"),
    ("60,us-east,llama,nan", "tokens_per_s"),
    ("60,us-east,llama,many", "tokens_per_s"),
    ("61,us-east,llama,", "start_s"),
    ("60,us-east,llama", None),
    ('60,us-east,"llama,1', None),
)


def test_a_bad_line_is_named_and_nothing_is_kept(ask: Ask, fleet: None, database: Database) -> None:
    for line, param in BAD_LINES:
        told = _import(ask, f"{HEADER}60,us-east,llama,1\n{line}\n", status=400)
        assert told["param"] == param, line
        assert "line 3" in told["detail"], line
    told = _import(ask, HEADER.encode() + b"60,us-east,ll\xffma,1\n", status=400)
    assert (told["param"], "line 2" in told["detail"]) == ("model", True)
    assert _rows(database) == 0


def test_a_bad_line_after_many_good_ones_undoes_them(ask: Ask, fleet: None, database: Database) -> None:
    good = "".join(f"{60 * i},us-east,llama,1\n" for i in range(30_000))
    assert "line 30002" in _import(ask, HEADER + good + "x,us-east,llama,1\n", status=400)["detail"]
    assert _rows(database) == 0
    assert _import(ask, HEADER + good)["rows"] == 30_000


def test_files_that_are_no_demand(ask: Ask, fleet: None) -> None:
    for content in ("", "start_s,region,model\n", HEADER.replace("model", "region"), b"\xff\xfe\x00"):
        assert "line 1" in _import(ask, content, status=400)["detail"]


def test_an_empty_file_is_no_error(ask: Ask, fleet: None) -> None:
    assert _import(ask, HEADER) == {"rows": 0, "series": 0, "first_s": None, "last_s": None}


def test_a_file_over_the_limit(ask: Ask, fleet: None, settings: Settings, database: Database) -> None:
    line = "60,us-east,llama,1\n"
    content = HEADER + line * (settings.file_bytes_max // len(line) + 1)
    assert str(settings.file_bytes_max) in _import(ask, content, status=413)["detail"]
    assert _rows(database) == 0


def test_a_repeated_import_answers_the_same(ask: Ask, fleet: None) -> None:
    once = {"headers": {"Idempotency-Key": "week-1"}}
    content = f"{HEADER}60,us-east,llama,1\n"
    assert _import(ask, content, **once) == _import(ask, content, **once)
    assert [event["action"] for event in ask("GET", "/admin/audit")["data"]].count("demand.import") == 1
    _import(ask, content + "120,us-east,llama,1\n", status=409, **once)


def test_the_span_that_may_be_read_has_a_limit(ask: Ask) -> None:
    query = {"model": "llama", "region": "us-east", "since_s": 0, "until_s": DAY_S}
    assert ask("GET", "/admin/demand", params=query, status=400)["param"] == "since_s"
    assert ask("GET", "/admin/forecasts") == {"origin_s": None, "data": []}
