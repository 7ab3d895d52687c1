"""systemd understands every line of the units, and finds little in them that an intruder could use."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ops.deploy.commands import fault_of_command

ROOT = Path(__file__).parents[3]
UNITS = ROOT / "ops/deploy/systemd"
SERVICES = sorted(UNITS.glob("*.service"))
LOCAL_UNITS = Path("/usr/lib/systemd/system")
EXPOSURE_MAX = 20
"""Of `systemd-analyze security`, in tenths: it calls up to 4.9 OK, and a unit without any protection 9.6 UNSAFE."""
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None or not LOCAL_UNITS.is_dir(), reason="there is no systemd-analyze here"
)


def _started(path: Path) -> str:
    """The name under which a unit is started: a template needs an instance."""
    return path.name.replace("@.", "@node-1.")


def _analyze(*arguments: str, root: Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", arguments[0], "--no-pager", f"--root={root}", *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def _installed(root: Path) -> Path:
    """A file system with this system's own units, ours, and the program that they start."""
    shutil.copytree(LOCAL_UNITS, root / LOCAL_UNITS.relative_to("/"), symlinks=True)
    shutil.copytree(UNITS, root / "etc/systemd/system")
    program = root / "opt/tidepool/bin/tidepool"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return root


def test_there_is_a_unit_for_each_process() -> None:
    names = {path.name.removeprefix("tidepool-").removesuffix(".service").rstrip("@") for path in SERVICES}
    assert names == {"api", "dispatcher", "worker", "forecaster", "beat", "agent", "migrate", "init"}


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_a_unit_starts_a_command_that_exists(path: Path) -> None:
    [line] = re.findall(r"^ExecStart=(.+)$", path.read_text(), flags=re.MULTILINE)
    program, *arguments = line.split()
    assert program == "/opt/tidepool/bin/tidepool"
    assert fault_of_command(arguments) is None


def test_what_the_page_enables_starts_with_the_machine(tmp_path: Path) -> None:
    """The target of the control plane's units is wanted by the machine only once it is enabled itself. A unit that is
    disabled leaves it to the others.
    """
    commands = re.findall(r"systemctl enable --now ([^`]+)`", (ROOT / "ops/docs/install.md").read_text())
    enabled = {name if "." in name else f"{name.split('@')[0]}{'@' * ('@' in name)}.service" for command in commands
               for name in command.split()}  # fmt: skip
    units = {path.name: path.read_text() for path in UNITS.iterdir() if path.is_file()}
    assert enabled == {name for name, text in units.items() if "[Install]" in text}
    for name in enabled:
        [wanted] = re.findall(r"^WantedBy=(.+)$", units[name], flags=re.MULTILINE)
        assert wanted == "multi-user.target" or wanted in enabled
        assert "Also=" not in units[name], "to disable the unit would disable that too"


@needs_systemd
def test_systemd_has_nothing_to_say_about_the_units(tmp_path: Path) -> None:
    """An unknown key is a warning and no failure, so any output counts."""
    units = [_started(path) for path in (*SERVICES, *UNITS.glob("*.target"))]
    verified = _analyze("verify", *units, root=_installed(tmp_path))
    assert (verified.stdout, verified.stderr, verified.returncode) == ("", "", 0)


@needs_systemd
def test_an_unknown_key_is_found(tmp_path: Path) -> None:
    root = _installed(tmp_path)
    unit = root / "etc/systemd/system/tidepool-api.service"
    unit.write_text(unit.read_text().replace("Restart=", "Restarts="))
    assert "Restarts" in _analyze("verify", unit.name, root=root).stderr


@needs_systemd
def test_units_are_hardened(tmp_path: Path) -> None:
    root, wrong = _installed(tmp_path), []
    for path in SERVICES:
        scored = _analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", _started(path), root=root)
        if scored.returncode:
            wrong.append(f"{path.name}: {(scored.stdout or scored.stderr).strip().splitlines()[-1]}")
    assert not wrong, "\n".join(wrong)


@needs_systemd
def test_a_unit_that_is_not_hardened_is_found(tmp_path: Path) -> None:
    root = _installed(tmp_path)
    shutil.rmtree(root / "etc/systemd/system/tidepool-.service.d")
    scored = _analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", "tidepool-api.service", root=root)
    assert scored.returncode
