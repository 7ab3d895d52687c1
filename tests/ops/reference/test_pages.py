import re

import pytest

from controlplane.api.metrics import Metrics
from controlplane.settings import Settings
from dataplane.agent.settings import AgentSettings, WorkerSettings
from dataplane.runtime.logs import LogSettings
from ops.reference.markdown import code, plain, table
from ops.reference.metrics import gateway_metrics
from ops.reference.pages import OPS, PAGES, write_pages


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_what_the_code_says(name: str) -> None:
    committed = (OPS / name).read_text(encoding="utf-8")
    assert committed == PAGES[name](), f"ops/{name} is stale: run `make reference` and commit what it writes"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_depends_on_the_code_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = PAGES[name]()
    for variable, value in {"HOME": "/elsewhere", "COLUMNS": "40", "TIDEPOOL_PORT": "9", "TIDEPOOL_HOME": "/x"}.items():
        monkeypatch.setenv(variable, value)
    assert PAGES[name]() == before


def test_only_pages_that_differ_are_written(tmp_path) -> None:
    assert {path.relative_to(tmp_path).as_posix() for path in write_pages(tmp_path)} == set(PAGES)
    (tmp_path / "docs/metrics.md").write_text("old", encoding="utf-8")
    assert [path.name for path in write_pages(tmp_path)] == ["metrics.md"]


@pytest.mark.parametrize("settings", [Settings, AgentSettings, WorkerSettings, LogSettings])
def test_every_setting_says_what_it_does(settings) -> None:
    silent = [name for name, field in settings.model_fields.items() if not field.description]
    assert not silent, f"{settings.__name__}: give these a description: {silent}"


def test_every_metric_that_a_gateway_exposes_is_described() -> None:
    text = Metrics().render().decode()
    exposed = set(re.findall(r"^# TYPE (\S+) (?:counter|gauge|histogram)$", text, re.MULTILINE))
    described = {f"{family.name}_total" if family.type == "counter" else family.name for family, _ in gateway_metrics()}
    assert {name for name in exposed if not name.endswith("_created")} == described


def test_text_in_a_table_shows_as_it_is() -> None:
    assert plain("*: any | `a|b` <int>") == r"\*: any \| `a\|b` \<int>"
    assert code("a|b") == r"`a\|b`"
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
