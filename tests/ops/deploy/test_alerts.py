"""Alerts ask for what is exported, and each has a runbook, a page of the console and a test for promtool."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ops.deploy.exported import AGENT, GATEWAY, Sample, exported
from tests.ops.deploy.promql import faults
from tests.ops.deploy.test_boards import PAGES

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "ops/deploy/alerts").glob("*.yaml"))
RUNBOOKS = ROOT / "ops/docs/runbooks"
SCRAPED = yaml.safe_load((ROOT / "ops/deploy/prometheus.yaml").read_text())
_BASE = r"\{\{ \$externalLabels\.(\w+) \}\}"


def _rules(path: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


RULES = [rule for path in FILES for rule in _rules(path)]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
BY_NAME = pytest.mark.parametrize("name", ALERTS)


def known() -> dict[str, Sample]:
    recorded = {rule["record"]: Sample(type="gauge", labels=frozenset({"tier"})) for rule in RULES if "record" in rule}
    return exported() | recorded


def test_there_are_alerts_and_each_has_one_name() -> None:
    assert len(ALERTS) == sum("alert" in rule for rule in RULES) > 20


def test_every_rule_asks_for_what_is_exported() -> None:
    found = [
        (rule.get("alert", rule.get("record")), fault) for rule in RULES for fault in faults(rule["expr"], known())
    ]
    assert found == []


@BY_NAME
def test_an_alert_says_what_is_wrong_and_where_to_look(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"critical", "warning"}
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url", "console_url"}
    for sentence in (notes["summary"], notes["description"]):
        assert sentence[0].isupper() or sentence.startswith("{{ $value"), sentence
        assert sentence.endswith("."), sentence
    runbook = re.fullmatch(_BASE + r"/ops/docs/runbooks/([\w-]+)\.html", notes["runbook_url"])
    console = re.fullmatch(_BASE + r"/ui/#/(\w+)(/\{\{.*\}\})?", notes["console_url"])
    assert runbook is not None
    assert console is not None
    assert {runbook[1], console[1]} <= set(SCRAPED["global"]["external_labels"])
    assert runbook[2] == _page(name), "a runbook is named after its alert"
    assert console[2] in PAGES


def _page(alert: str) -> str:
    """The name of an alert's runbook."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", alert.removeprefix("Tidepool")).lower()


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {_page(name) for name in ALERTS}


@BY_NAME
def test_a_runbook_says_what_it_means_how_to_look_and_what_to_do(name: str) -> None:
    text = (RUNBOOKS / f"{_page(name)}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n")
    for part in ("**Means.**", "**Look.**", "**Do.**", "**Do not.**"):
        assert text.count(f"\n{part} ") == 1, part
    assert "tidepool " in text
    console = re.search(r"/ui/#/(\w+)", text)
    assert console is not None
    assert console[1] in PAGES


def test_runbooks_name_commands_and_options_that_exist() -> None:
    sections = re.split(
        r"^## (tidepool.*)$", (ROOT / "ops/docs/cli.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    commands = dict(zip(sections[1::2], sections[2::2], strict=True))
    groups = {name.rpartition(" ")[0] for name in commands}
    named = 0
    for page in RUNBOOKS.glob("*.md"):
        for line in re.findall(r"(?:^|`)(tidepool [^`#\n]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            words = re.sub(r" --url \S+", "", line).split()
            command = max((name for name in commands if words[: len(name.split())] == name.split()), key=len)
            rest = words[len(command.split()) :]
            assert command not in groups or not rest, f"{page.name}: {line}"
            for option in re.findall(r"--[\w-]+", " ".join(rest)):
                assert option == "--help" or option in commands[command], f"{page.name}: {line}"
            named += 1
    assert named > 60


def test_every_alert_is_tested_by_promtool() -> None:
    tests = {path.name: path.read_text() for path in (ROOT / "ops/deploy/alerts/tests").glob("*.yaml")}
    assert set(tests) == {path.name for path in FILES}
    for path in FILES:
        names = {rule["alert"] for rule in _rules(path) if "alert" in rule}
        tested = set(re.findall(r'alertname="(\w+)", alertstate="firing", severity', tests[path.name]))
        tested |= set(re.findall(r"alertname: (\w+)", tests[path.name]))
        assert names == tested, path.name


def test_prometheus_scrapes_what_boards_and_alerts_know() -> None:
    jobs = {job["job_name"]: job for job in SCRAPED["scrape_configs"]}
    assert set(jobs) == {GATEWAY, AGENT}
    assert all(config["labels"]["region"] for config in jobs[AGENT]["static_configs"])
    asked = set(re.findall(r'job="([\w-]+)"', "".join(rule["expr"] for rule in RULES)))
    assert asked == set(jobs)
    [loaded] = SCRAPED["rule_files"]
    assert sorted((ROOT / "ops/deploy").glob(loaded)) == FILES
