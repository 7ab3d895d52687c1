"""`python -m ops.cli.skewed SECONDS COMMAND`: a process of Tidepool whose clock is wrong.

Only `time.time` is shifted, which policies and loops read; leases, deadlines and files follow Postgres's clock.
"""

import sys
import time


def skew(by_s: float) -> None:
    """Shift this process's `time.time`. Before anything else is imported that might keep the right one."""
    real = time.time
    time.time = lambda: real() + by_s


if __name__ == "__main__":
    skew(float(sys.argv[1]))
    from ops.cli.main import main

    main(sys.argv[2:])
