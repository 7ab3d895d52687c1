"""Rules that matter, held by a tool: no clock or chance in pure code, files and functions of readable length, documents
that name what exists, state charts that match the tables, and no word for a thing that has another one.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from controlplane.policies import lifecycle

ROOT = Path(__file__).parents[1]
PACKAGES = ("controlplane", "dataplane", "forecasts", "migrations", "ops")
PURE = (
    "controlplane/policies",
    "forecasts",
    "dataplane/engines/core/remapping",
    "dataplane/memory/residency.py",
    "dataplane/scheduling",
)
TIMED = "forecasts/backtests.py"  # says what each model costs
SQL = {"delete", "func", "insert", "literal_column", "select", "text", "update"}
SQL_HOMES = (
    "controlplane/store/",
    "migrations/",
    "ops/bench/console/fleet.py",
    "ops/bench/queue/run.py",
    "ops/faults/check.py",
)
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 55
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "service", "misc"}
CLOCKS = {"now", "utcnow", "today", "time", "monotonic", "perf_counter", "sleep"}
CHANCE = {"random", "secrets", "uuid", "uuid_utils"}


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # a file of the change counts too
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        return [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def _sources() -> list[Path]:
    return [p for p in _tracked() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in PACKAGES]


def _pure() -> list[Path]:
    return [p for p in _sources() if str(p.relative_to(ROOT)).startswith(PURE) and not str(p).endswith(TIMED)]


def test_there_is_something_to_check() -> None:
    assert len(_sources()) > 60
    assert len(_pure()) > 10


@pytest.mark.parametrize("path", _pure(), ids=lambda p: str(p.relative_to(ROOT)))
def test_pure_code_has_no_clock_and_no_chance(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            assert not any(name.split(".")[0] in CHANCE | {"time"} for name in names), ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            assert not (node.func.attr in CLOCKS and owner in {"time", "datetime", "date"}), ast.unparse(node)
            if node.func.attr == "default_rng":
                assert node.args, f"a generator without a seed: {ast.unparse(node)}"


def test_the_control_plane_reads_the_time_of_day_in_one_way() -> None:
    """`ops.cli.skewed` shifts `time.time` alone, so a drill with wrong clocks would not see another one."""
    others = {"now", "utcnow", "today"}
    for path in _sources():
        if path.relative_to(ROOT).parts[0] == "controlplane":
            calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            names = {
                (call.value.id, call.attr)
                for call in calls
                if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name)
            }
            assert not {attr for value, attr in names if value in {"datetime", "date"}} & others, path


def test_sql_has_one_home() -> None:
    """Nobody else builds statements; the benchmarks of the queue and of the console, and the faults' check, work on a
    database from outside.
    """
    found: list[str] = []
    for path in _sources():
        name, source = str(path.relative_to(ROOT)), path.read_text()
        if name.startswith(SQL_HOMES) or "sqlalchemy" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                wrong = any(alias.name.split(".")[0] == "sqlalchemy" for alias in node.names)  # hides what is used
            else:
                wrong = (
                    isinstance(node, ast.ImportFrom)
                    and (node.module or "").split(".")[0] == "sqlalchemy"
                    and any(alias.name in SQL for alias in node.names)
                )
            if wrong:
                found.append(f"{name}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def test_the_command_line_quotes_names_in_paths() -> None:
    """`path_to` of the client does: a name with `#`, `?` or `..` in a path of its own would be another path."""
    unquoted = re.compile(r"""f["']/(admin|v1)/[^"'?]*{""")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in _sources()
        if str(path.relative_to(ROOT)).startswith(("ops/cli/", "ops/client/"))
        for line in path.read_text().splitlines()
        if unquoted.search(line)
    ]
    assert not found, "\n".join(found)


def test_files_and_functions_stay_readable() -> None:
    long: list[str] = []
    for path in _sources():
        if "versions" in path.parts:
            continue
        text = path.read_text()
        lines = text.count("\n")
        if lines > FILE_LINES_MAX:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > FUNCTION_LINES_MAX:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {size} lines")
    assert not long, "\n".join(long)


def test_no_file_is_a_drawer_for_everything() -> None:
    assert not [p for p in _sources() if p.stem in BANNED_NAMES or p.parent.name in BANNED_NAMES]


def test_top_level_is_fixed() -> None:
    folders = {p.relative_to(ROOT).parts[0] for p in _tracked() if len(p.relative_to(ROOT).parts) > 1}
    assert folders <= {*PACKAGES, "tests", ".ci"}


def _documents() -> list[Path]:
    return [p for p in _tracked() if p.suffix == ".md" and (p.parent == ROOT or ROOT / "ops" / "docs" in p.parents)]


def test_documents_name_what_exists() -> None:
    """Every path in backticks exists, and behind `path:name` the file defines the name; so do modules to be run."""
    folders = "|".join((*PACKAGES, "tests"))
    named = re.compile(rf"`((?:{folders})/[\w./-]*(?:{{[\w,]+}})?[\w./-]*)(?::(\w+))?`")
    checked, wrong = 0, []
    for document in _documents():
        if document.name == "CHANGELOG.md":
            continue
        for path, name in named.findall(document.read_text()):
            head, _, rest = path.partition("{")
            choices, _, tail = rest.partition("}")
            for choice in choices.split(","):
                checked += 1
                target = ROOT / f"{head}{choice}{tail}"
                if not target.exists():
                    wrong.append(f"{document.relative_to(ROOT)}: {path} is not there")
                elif name and not re.search(rf"^ *(async def|def|class) {name}\b", target.read_text(), re.MULTILINE):
                    wrong.append(f"{document.relative_to(ROOT)}: {path} defines no {name}")
        for module in re.findall(r"python -m (ops[\w.]*)", document.read_text()):
            path = ROOT / module.replace(".", "/")
            if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
                wrong.append(f"{document.relative_to(ROOT)}: {module} is no module to run")
    assert checked > 100
    assert not wrong, "\n".join(wrong)


def test_the_glossary_says_what_the_code_says() -> None:
    """The last column of the concepts' tables has names of the source."""
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in _sources())))
    glossary = (ROOT / "ops" / "docs" / "concepts.md").read_text().split("## Glossary")[1]
    named = [
        re.findall(r"`([A-Za-z_.]+)`", row.rsplit("|", 2)[1]) for row in glossary.splitlines() if row.count("|") == 4
    ]
    assert len(named) > 60
    assert not [name for names in named for name in names if name.rpartition(".")[2] not in words]


@pytest.mark.parametrize("name", ["INSTANCE", "PLAN", "BATCH", "BATCH_REQUEST"])
def test_state_charts_match_the_tables(name: str) -> None:
    text = (ROOT / "ops" / "decisions" / "states.md").read_text()
    chart = text.split(f"## {name}\n")[1].split("\n## ")[0]
    drawn = set(re.findall(r"^ +(\w+) --> (\w+)$", chart, flags=re.MULTILINE))
    machine = getattr(lifecycle, name)
    assert drawn == {(before.value, after.value) for before, afters in machine.items() for after in afters}


def test_nothing_is_left_undone() -> None:
    undone = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    found = [
        f"{p.relative_to(ROOT)}: {line}"
        for p in _sources()
        for line in p.read_text().splitlines()
        if undone.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_lock_pins_every_dependency() -> None:
    lock = (ROOT / "ops" / "requirements.lock").read_text()
    pinned = {re.split(r"[=\[]", line)[0].lower() for line in lock.splitlines() if "==" in line}
    project = (ROOT / "pyproject.toml").read_text()
    wanted = {m.lower() for m in re.findall(r'^ +"([A-Za-z0-9_-]+)(?:\[[^\]]*\])?[><=]', project, flags=re.MULTILINE)}
    assert len(wanted) > 20
    assert wanted - pinned <= {"torch"}, wanted - pinned
