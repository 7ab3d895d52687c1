"""A figure says of which commit it is, and whether the code differed from it."""

import subprocess
from pathlib import Path

import pytest

from ops.bench.commit import CommitError, commit_of


def test_the_commit_is_marked_where_files_differ_that_the_run_does_not_write(tmp_path: Path) -> None:
    docs = tmp_path / "ops" / "docs"
    (docs / "runs").mkdir(parents=True)
    written = (docs / "results.json", docs / "runs" / "one.json")
    for file in (*written, tmp_path / "code.py"):
        file.write_text("before")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "m"]):
        subprocess.run([*git, *command], check=True)
    for file in written:
        file.write_text("after")
    commit = commit_of(docs, ["results.json", "runs"])
    assert commit.isalnum()
    assert commit_of(docs, ["runs"]) == f"{commit}+"
    (tmp_path / "code.py").write_text("after")
    assert commit_of(docs, ["results.json", "runs"]) == f"{commit}+"
    with pytest.raises(CommitError, match="the commit is not known"):
        commit_of(tmp_path / "none", [])
