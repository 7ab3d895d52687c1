"""`python -m ops.deploy.images.locks`: write the locks of the images, with the hash of each wheel.

The versions are those of `ops/requirements.lock`; each lock is the part of it that an image needs, for CPython 3.11 on
x86-64 Linux. torch, and setuptools for it, are no part: a node's image takes the build of its kind, CPU or CUDA.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
_CONSTRAINTS = ROOT / "ops" / "requirements.lock"
WANTED = {
    "build.lock": ("hatchling",),
    # redis needs async-timeout before Python 3.11.3, as Debian 12 has it, and this may be a newer one
    "control.lock": (f"tidepool[control,s3,traces] @ {ROOT.as_uri()}", "async-timeout"),
    "node.lock": (f"tidepool[node,torch,traces] @ {ROOT.as_uri()}",),
}
"""What each lock is made for."""
_LEFT_OUT = {"tidepool", "torch", "setuptools"}


def lock_of(wanted: Sequence[str]) -> str:
    """The lines of a lock, in the order of their names, each wheel with its SHA-256."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report=-"]
    command += ["--only-binary=:all:", f"--constraint={_CONSTRAINTS}", *wanted]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return "".join(f"{line}\n" for line in sorted(_pins(json.loads(done.stdout)["install"])))


def _pins(resolved: Sequence[Any]) -> Iterator[str]:
    needed = {each["metadata"]["name"].lower(): each for each in resolved}
    for name, each in needed.items():
        if name not in _LEFT_OUT and not name.startswith(("nvidia", "cuda", "triton")):
            digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
            yield f"{name}=={each['metadata']['version']} --hash=sha256:{digest}"


if __name__ == "__main__":
    for name, wanted in WANTED.items():
        (HERE / name).write_text(lock_of(wanted), encoding="utf-8")
        print(f"written: {HERE / name}")
