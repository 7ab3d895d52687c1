"""`python released.py FILE COMMAND`: run a command of `tidepool` from the source tree that FILE names.

A plain script, which imports nothing of the project: it is what tells two releases of it apart. The tree is the working
folder and first on the path, also of the processes that the command starts.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    tree = Path(sys.argv[1]).read_text().strip()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = tree
    os.execv(sys.executable, [sys.executable, "-m", "ops.cli.main", *sys.argv[2:]])  # noqa: S606 - to become it
