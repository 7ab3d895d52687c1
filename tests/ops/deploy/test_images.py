"""The images' locks are parts of the project's lock, with hashes; the compose file runs commands that exist."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ops.deploy.commands import fault_of_command

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "ops/deploy/images"
LOCKS = sorted(IMAGES.glob("*.lock"))
CONTAINERFILE = (IMAGES / "Containerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "ops/deploy/compose/compose.yaml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if "TIDEPOOL" in str(service)}
_PIN = re.compile(r"([a-z0-9][a-z0-9._-]*)==([^\s;]+)", re.IGNORECASE)


def _versions(path: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in _PIN.findall(path.read_text()):
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return found


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_each_wheel_of_an_image_is_locked_with_its_hash(path: Path) -> None:
    """After a change of the lock: `make lock-images`."""
    locked = _versions(ROOT / "ops/requirements.lock")
    lines = path.read_text().splitlines()
    assert len(lines) > 3
    assert not [line for line in lines if not re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line)]
    wrong = {name: versions for name, versions in _versions(path).items() if not versions <= locked.get(name, set())}
    assert not wrong, wrong


def test_images_install_only_what_is_locked_and_run_as_nobody_in_particular() -> None:
    assert set(re.findall(r"-r locks/(\S+\.lock)", CONTAINERFILE)) == {path.name for path in LOCKS}
    installs = re.findall(r"pip install (.*)", CONTAINERFILE)
    hashed = [each for each in installs if "--require-hashes" in each]
    assert len(hashed) == 3
    rest = [each for each in installs if each not in hashed]
    assert all("torch==${TORCH}" in each or "--no-index /wheels" in each for each in rest), rest
    assert set(re.findall(r"^FROM \S+ AS (control|node\S*)$", CONTAINERFILE, re.MULTILINE)) == {
        "control",
        "node-cpu",
        "node-cuda",
    }
    final = CONTAINERFILE.split(" AS final")[1].split("FROM")[0]
    assert "USER 10001:10001" in final
    assert 'ENTRYPOINT ["tidepool"]' in final


def test_a_commit_built_twice_has_nothing_of_the_clock() -> None:
    """Files have the commit's time, and bytecode is checked by its source's hash, not by a time."""
    shown = subprocess.run(["make", "-n", "image"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--timestamp $(git log -1 --format=%ct)" in shown
    assert re.search(r"^ENV .*SOURCE_DATE_EPOCH=0$", CONTAINERFILE, re.MULTILINE)


def test_compose_has_every_process() -> None:
    assert set(OURS) == {"init", "api", "dispatcher", "worker", "forecaster", "beat", "agent"}


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_a_command_that_exists(name: str) -> None:
    assert fault_of_command(OURS[name]["command"]) is None


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_confined(name: str) -> None:
    assert OURS[name]["read_only"] is True
    assert OURS[name]["cap_drop"] == ["ALL"]
    assert OURS[name]["security_opt"] == ["no-new-privileges:true"]


def test_the_example_names_each_variable_that_has_no_value() -> None:
    text = (ROOT / "ops/deploy/compose/compose.yaml").read_text()
    example = set(re.findall(r"^([A-Z_]+)=", (ROOT / "ops/deploy/compose/example.env").read_text(), re.MULTILINE))
    assert example <= set(re.findall(r"\$\{([A-Z_]+)", text))
    assert set(re.findall(r"\$\{([A-Z_]+):\?", text)) <= example
