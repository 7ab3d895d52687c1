"""The previous release and this one run side by side: every process is replaced under load, and back."""

import json
import subprocess
from pathlib import Path

import pytest

from ops.faults.upgrade import NoReleaseError, Releases, schema_of, seamless_findings, unpack_release
from tests.ops.faults.test_check import streamed
from tests.ops.faults.test_run import run_cli


@pytest.fixture
def previous(tmp_path: Path) -> Path:
    try:
        return unpack_release(tmp_path / "previous")
    except NoReleaseError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_every_process_is_upgraded_under_load_and_rolled_back(previous: Path) -> None:
    small = ("--regions", "2", "--nodes", "3", "--models", "2", "--streams", "3")
    ended = run_cli("--upgrade", "--minutes", "0.2", "--every-s", "1", *small, "--json")
    assert ended.stdout, ended.stderr
    report = json.loads(ended.stdout)
    assert report["broken"] == [], ended.stderr
    assert ended.returncode == 0
    processes = 2 + 2 + 1 + 2 + 3
    assert report["faults"] == {"upgrade": processes, "roll back": processes}
    assert report["interactive"]["outcomes"].keys() == {"whole"}
    assert report["batches"]["lines_by_code"] == {"200": report["batches"]["lines"]}


def test_the_previous_release_has_a_schema_of_its_own(previous: Path) -> None:
    assert schema_of(previous) == "0036"
    assert (previous / "ops" / "cli" / "main.py").exists()


def test_a_release_that_is_not_in_the_history_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoReleaseError, match="commit 000000000000, is not in this checkout's history"):
        unpack_release(tmp_path / "none", commit="0" * 40)


def test_a_process_starts_from_the_tree_that_was_chosen_last(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name / "ops" / "cli").mkdir(parents=True)
        (tmp_path / name / "ops" / "__init__.py").touch()
        (tmp_path / name / "ops" / "cli" / "__init__.py").touch()
        (tmp_path / name / "ops" / "cli" / "main.py").write_text(f"import sys; print({name!r}, *sys.argv[1:])")
    releases = Releases(tmp_path / "releases", ["api"], tmp_path / "old")

    def started() -> str:
        command = ["python3", *releases.programs()["api"], "api", "--more"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert started() == "old api --more"
    releases.choose("api", tmp_path / "new")
    assert started() == "new api --more"


def test_what_a_client_notices_is_a_finding() -> None:
    noticed = [streamed(), streamed(outcome="broken", reason="ReadError"), streamed(reason="503 unavailable")]
    found = seamless_findings(noticed, ["ConnectError"])
    assert len(found) == 3
    assert "broken: ReadError" in found[0]
    assert "503 unavailable" in found[1]
    assert seamless_findings([streamed(attempts=2)], []) == []
