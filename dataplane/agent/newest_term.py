"""The newest term that a node has seen, kept over its restarts in a small file."""

import os
from pathlib import Path

import structlog

log = structlog.get_logger()


class NewestTerm:
    """A number that only rises. It is written before it counts, and read again when the agent starts. Without a folder
    it is lost with the process.

    Raises:
        OSError: the folder cannot be made, or the file not be read, or it holds no term.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else _file_in(folder)
        self.value = 0 if self._file is None else _read(self._file)

    def note(self, term: int) -> None:
        """Keep a term, if it is newer. A disk that refuses it is logged, and the term then holds for this process."""
        if term <= self.value:
            return
        self.value = term
        if self._file is None:
            return
        try:
            _write(self._file, term)
        except OSError as error:
            log.error("the newest term would not survive a restart", file=str(self._file), error=str(error))


def forget_term(folder: Path) -> None:
    """Let the next agent obey any term: its node has moved to another installation, for example."""
    _file_in(folder).unlink(missing_ok=True)


def _file_in(folder: Path) -> Path:
    return folder.expanduser() / "term"


def _read(file: Path) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = file.read_text()
    except FileNotFoundError:
        return 0
    if not text.strip().isdecimal():
        raise OSError(f"{file} holds no term; start once with `tidepool agent --forget-term`")
    return int(text)


def _write(file: Path, term: int) -> None:
    """Replace the file at once, whatever happens to the machine meanwhile."""
    partial = file.with_suffix(".new")
    with partial.open("w") as target:
        target.write(f"{term}\n")
        target.flush()
        os.fsync(target.fileno())
    partial.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
