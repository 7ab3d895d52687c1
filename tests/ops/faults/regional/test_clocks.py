"""What processes with a wrong clock are run by."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ops.faults.regional.clocks import shift_library, shifted, skews_s

PLAIN = (sys.executable, "-m", "ops.cli.main", "api")
NOW = (sys.executable, "-c", "import time; print(time.time(), time.monotonic())")


def test_one_region_has_the_right_time() -> None:
    assert skews_s(("a", "b", "c"), 5.0) == {"a": 0.0, "b": 5.0, "c": -5.0}
    assert shifted(0.0, Path("/lib/x.so"))(PLAIN) == PLAIN


@pytest.mark.parametrize("library", [None, Path("/lib/x.so")])
def test_our_own_processes_shift_their_clock_themselves(library: Path | None) -> None:
    assert shifted(-5.0, library)(PLAIN) == (sys.executable, "-m", "ops.cli.skewed", "-5.0", "api")


def test_without_the_library_servers_have_the_right_time() -> None:
    command = shifted(-5.0, None)
    assert command(("postgres", "-D", "data")) == ("postgres", "-D", "data")


def test_the_library_is_loaded_after_the_change_of_user() -> None:
    wrapped = shifted(5.0, Path("/lib/x.so"))(
        ("python", "privileges.py", "--user", "nobody", "--", "postgres", "-D", "d")
    )
    at = wrapped.index("env")
    assert wrapped[at - 1] == "--"
    assert "LD_PRELOAD=/lib/x.so" in wrapped[at:]
    assert "FAKETIME=+5" in wrapped[at:]
    assert wrapped[-3:] == ("postgres", "-D", "d")


def test_the_library_shifts_the_time_of_day_and_not_the_monotonic_clock() -> None:
    library = shift_library()
    if library is None:
        pytest.skip("libfaketime is not installed")
    before_s = time.time(), time.monotonic()
    told = subprocess.run(shifted(-500.0, library)(NOW), capture_output=True, text=True, check=True).stdout.split()
    after_s = time.time(), time.monotonic()
    assert before_s[0] - 500 <= float(told[0]) <= after_s[0] - 500
    assert before_s[1] <= float(told[1]) <= after_s[1]
