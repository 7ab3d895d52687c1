"""An image says what it has installed."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ops.deploy.images.bill_of_materials import digests_of

IMAGES = Path(__file__).parents[3] / "ops/deploy/images"
CONTROL = IMAGES / "control.lock"


def printed() -> str:
    command = [sys.executable, "-m", "ops.deploy.images.bill_of_materials", str(CONTROL)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_bill_has_each_package_with_its_version_license_and_hash() -> None:
    bill: dict[str, Any] = json.loads(printed())
    assert bill["metadata"]["component"]["name"] == "tidepool"
    found = {each["name"]: each for each in bill["components"]}
    assert found["torch"]["version"] == version("torch")
    assert found["fastapi"]["purl"] == f"pkg:pypi/fastapi@{version('fastapi')}"
    assert found["fastapi"]["licenses"] == [{"expression": "MIT"}]
    digest = digests_of([CONTROL.read_text()])["fastapi", version("fastapi")]
    assert found["fastapi"]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert "hashes" not in found["torch"], "its build is not locked"
    assert "tidepool" not in found


def test_the_same_packages_give_the_same_bytes() -> None:
    assert printed() == printed()


def test_each_image_has_the_bill_of_its_own_packages() -> None:
    """After the last installation, so that torch is in it."""
    lines = re.sub(r"^#.*\n", "", (IMAGES / "Containerfile").read_text(), flags=re.MULTILINE)
    stages = re.split(r"^FROM ", lines, flags=re.MULTILINE)
    copied = {stage.split("--from=")[1].split()[0] for stage in stages if "--from=" in stage}
    assert len(copied) == 3
    for name in copied:
        stage = next(stage for stage in stages if f" AS {name}\n" in stage)
        assert stage.rstrip().endswith(".lock > /opt/tidepool/sbom.cdx.json")
