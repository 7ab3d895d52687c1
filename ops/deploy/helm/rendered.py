"""`python -m ops.deploy.helm.rendered`: write what the chart makes of each file of `examples/` into `rendered/` anew.

Helm is taken from TIDEPOOL_TEST_HELM, else from PATH.
"""

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
CHART = HERE / "tidepool"
RENDERED = HERE / "rendered"
EXAMPLES = sorted((HERE / "examples").glob("*.yaml"))


def helm_program() -> str | None:
    """Helm's path; None: there is none."""
    return os.environ.get("TIDEPOOL_TEST_HELM") or shutil.which("helm")


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm, which needs no cluster for what is done here."""
    program = helm_program()
    assert program is not None
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)


def render(values: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The manifests of a release `tidepool` in a namespace of that name."""
    return run_helm("template", "tidepool", str(CHART), "--namespace=tidepool", f"--values={values}", *options)


if __name__ == "__main__":
    RENDERED.mkdir(exist_ok=True)
    for example in EXAMPLES:
        done = render(example)
        done.check_returncode()
        (RENDERED / example.name).write_text(done.stdout, encoding="utf-8")
        print(f"written: {RENDERED / example.name}")
