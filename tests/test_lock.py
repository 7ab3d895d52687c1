"""What can be said of the locked dependencies without a network: each is pinned to one version from the package index.

Whether a version was yanked, abandoned or has known holes is asked by `make audit`, which needs the network.
"""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "ops" / "requirements.lock"
PRERELEASES = frozenset(
    {
        "opentelemetry-exporter-http-transport",
        "opentelemetry-exporter-otlp-common",
        "opentelemetry-semantic-conventions",
    }
)
"""Those that are taken although their makers call them unfinished."""


def _pins() -> list[Requirement]:
    return [Requirement(line) for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]


def test_each_is_pinned_to_one_version_of_the_index() -> None:
    pins = _pins()
    assert len(pins) > 60
    for pin in pins:
        assert pin.url is None, f"{pin}: comes from an address of its own"
        [one] = pin.specifier
        assert one.operator == "==", f"{pin}: not one version"
        assert "*" not in one.version, f"{pin}: not one version"
        assert not Version(one.version).is_prerelease or pin.name in PRERELEASES, f"{pin}: a pre-release"


def test_nothing_is_pinned_twice_for_one_machine() -> None:
    seen: dict[str, list[Marker | None]] = {}
    for pin in _pins():
        seen.setdefault(re.sub(r"[-_.]+", "-", pin.name).lower(), []).append(pin.marker)
    for name, markers in seen.items():
        assert len(markers) == 1 or all(markers), f"{name}: pinned twice"


def test_the_lock_changes_nothing_about_the_index() -> None:
    for line in LOCK.read_text().splitlines():
        assert not line.lstrip().startswith("-"), f"{line}: options belong to whoever installs"


def test_the_project_asks_for_no_address_or_exact_hash_of_its_own() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert " @ " not in "".join(re.findall(r'^ +"[^"]*",?$', project, flags=re.MULTILINE))


def test_make_installs_the_torch_that_the_extra_names() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "--eval", "show:;@echo $(TORCH)", "show"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"torch=={shown.stdout.split()[-1]}" in extras["torch"]
