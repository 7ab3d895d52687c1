"""What each extra is enough for, with the modules of the others absent."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ops.cli.extras import EXTRAS

NODE_LACKS = (
    *("alembic", "celery", "fastapi", "kombu", "matplotlib", "numpy", "pandas", "psycopg", "pulp", "redis", "scipy"),
    *("sqlalchemy", "statsmodels"),
)


def run_without(modules: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """A program in which these modules are not installed; it has no setting of Tidepool."""
    absent = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDEPOOL_")}
    return subprocess.run(
        [sys.executable, "-c", absent + code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    "code",
    [
        "import dataplane.agent.process, dataplane.worker.main, dataplane.engines.replay.engine",
        "from ops.cli.main import main; main(['agent', '--help'])",
        "from ops.cli.main import main; main(['node', '--help'])",
    ],
)
def test_a_node_needs_nothing_of_the_control_plane(code: str) -> None:
    ended = run_without(NODE_LACKS, code)
    assert ended.returncode == 0, ended.stderr


def test_an_agent_without_the_control_plane_reads_its_settings() -> None:
    ended = run_without(NODE_LACKS, "from ops.cli.main import main; main(['agent'])")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert "TIDEPOOL_AGENT_" in ended.stderr


@pytest.mark.parametrize(
    ("absent", "command", "extra"),
    [("sqlalchemy", ["migrate"], "control"), ("matplotlib", ["plan", "plot", "plan_1", "x.png"], "plots")],
)
def test_a_command_names_the_extra_that_it_lacks(absent: str, command: list[str], extra: str) -> None:
    code = (
        "from ops.cli.main import main; main(%r)"
        if extra == "control"
        else (
            "from ops.cli import plan_plot\n"
            "import ops.plots.panels\n"
            "plan_plot.connected = lambda context: ops.plots.panels.new_figure(1, 1)\n"
            "from ops.cli.main import main; main(%r)"
        )
    )
    ended = run_without((absent,), code % command)
    assert (ended.returncode, ended.stderr) == (
        1,
        f'error: {absent} is not installed: pip install "tidepool[{extra}]"\n',
    )


def test_the_table_of_extras_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    brought = {
        extra: {re.split(r"[<>=\[; ]", line)[0].replace("-", "_") for line in lines}
        for extra, lines in project["optional-dependencies"].items()
    }
    brought["control"] |= brought["forecast"]
    assert not [module for module, extra in EXTRAS.items() if module not in brought[extra]]
