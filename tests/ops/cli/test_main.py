"""`tidepool`: its help, what it imports, and how it fails."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from ops.cli.command_table import LazyCommand
from ops.cli.main import app
from tests.ops.cli.running import Run
from tests.ops.local.test_checkpoints import write_checkpoint


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, listed in getattr(group, "commands", {}).items():
        command = listed.load() if isinstance(listed, LazyCommand) else listed
        yield (*path, name)
        yield from _commands(command, (*path, name))


COMMANDS = tuple(_commands(typer.main.get_command(app)))
GROUPS = {path[0] for path in COMMANDS if len(path) == 2}
PROCESSES = {("node", "follow")}
"""Commands of a group that run until they are stopped, and answer nothing."""


def test_every_command_explains_itself_with_an_example(run: Run) -> None:
    assert {"up", "demo", "api", "dispatcher", "worker", "forecaster", "beat", "agent", "migrate", "status"} <= {
        c[0] for c in COMMANDS
    }
    for path in COMMANDS:
        outcome = run(*path, "--help")
        assert outcome.status == 0, path
        if path != (path[0],) or path[0] not in GROUPS:
            assert f"tidepool {' '.join(path)}" in outcome.out.replace("Usage: ", "", 1).split("\n", 1)[1], path
        if (len(path) == 2 and path not in PROCESSES) or path == ("status",):
            assert "--json" in outcome.out, path


def test_the_table_says_what_the_modules_define() -> None:
    for name, listed in typer.main.get_command(app).commands.items():
        assert isinstance(listed, LazyCommand)
        command = listed.load()
        assert (command.name, command.hidden) == (name, False)
        assert listed.help == command.get_short_help_str(1000), f"{name}: its line in `tidepool --help`"


HEAVY = ("torch", "sqlalchemy", "celery", "pandas", "numpy", "matplotlib", "pydantic", "msgspec", "structlog", "rich")


@pytest.mark.parametrize(("command", "unused"), [("--help", (*HEAVY, "httpx2", "ssl")), ("status", HEAVY)])
def test_a_command_imports_only_what_it_needs(command: str, unused: tuple[str, ...]) -> None:
    watched = (
        "import atexit, sys\nfrom ops.cli.main import main\n"
        f"atexit.register(lambda: print([name for name in {unused} if name in sys.modules]))\n"
        f"main({command.split()})"
    )
    environment = os.environ | {"TIDEPOOL_URL": "http://127.0.0.1:1", "TIDEPOOL_ADMIN_KEY": "x"}
    ended = subprocess.run(
        [sys.executable, "-c", watched], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == (1 if command == "status" else 0), ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"


def test_failures_are_one_line(run: Run, tmp_path: Path) -> None:
    outcome = run("region", "list")
    assert outcome.status == 1
    assert outcome.err.startswith("error: no key")
    assert outcome.err.count("\n") == 1
    (tmp_path / "keys.json").write_text("{}")
    assert "holds no admin key" in run("status").err
    refused = run("--key", "x", "--url", "http://127.0.0.1:1", "status")
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert "cannot be reached" in refused.err


@pytest.mark.parametrize(
    "arguments",
    [("frob",), ("region", "add"), ("region", "add", "a", "--position", "x"), ("demand", "import", "/x")],
)
def test_wrong_use_is_2(run: Run, arguments: tuple[str, ...]) -> None:
    outcome = run(*arguments)
    assert outcome.status == 2
    assert "Usage:" in outcome.err


@pytest.mark.parametrize("number", ["inf", "nan", "1e400"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("gpu", "add", "X", "--memory-gib", "80"), "--cost-per-hour"),
        (("gpu", "add", "X", "--cost-per-hour", "1"), "--memory-gib"),
        (("model", "profile", "m", "--tokens-per-s", "X=1"), "--load-time-s"),
    ],
)
def test_a_number_must_be_finite(run: Run, command: tuple[str, ...], option: str, number: str) -> None:
    refused = run(*command, option, number)
    assert (refused.status, option in refused.err) == (2, True), refused.err


def test_memory_has_a_limit(run: Run) -> None:
    assert run("gpu", "add", "X", "--memory-gib", "1e300", "--cost-per-hour", "1").status == 2


@pytest.mark.parametrize(
    "options",
    [
        *(("--tokens-per-s", rate) for rate in ("H800", "H800=", "=3", "H800=-1", "H800=nan", "H800=1e400")),
        *(("--slo", slo) for slo in ("IW-F", "IW-F=1", "NIW=1,1", "IW-N=1,0", "IW-N=1,2,3")),
        ("--min", "3", "--max", "2"),
    ],
)
def test_options_of_a_model_are_checked(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    assert run("model", "add", "m", "--path", write_checkpoint(tmp_path / "m"), *options).status == 2
