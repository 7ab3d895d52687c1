"""Of which commit a figure is."""

import subprocess
from collections.abc import Iterable
from pathlib import Path


class CommitError(Exception):
    """Git does not say which commit this is."""


def commit_of(folder: Path, written: Iterable[str]) -> str:
    """The commit of the checkout around a folder, with a `+` where tracked files differ from it. `written`: those in
    the folder that do not count, as the run writes them itself.

    Raises:
        CommitError: git does not say.
    """
    git = ["git", "-C", str(folder)]
    but = (f":(exclude){name}" for name in written)
    changed = ["status", "--porcelain", "--untracked-files=no", "--", ":(top)", *but]
    try:
        commit, differing = (
            subprocess.run([*git, *command], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "--short", "HEAD"], changed)
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise CommitError(f"the commit is not known: {error}") from error
    return f"{commit}{'+' if differing else ''}"
