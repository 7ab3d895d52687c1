"""Masks secrets in what a process writes to standard error."""

import re
from typing import IO, Any

_MASKS = (
    (re.compile(r"(?i)(bearer\s+)[^\s'\",]+"), r"\1***"),
    (re.compile(r"\b(tp-[a-z]+-)[A-Za-z0-9_-]{8,}"), r"\1***"),
    (re.compile(r"(://[^\s/:@]*:)[^\s/@]+@"), r"\1***@"),
)


def mask(text: str) -> str:
    """The text with `***` for API keys, bearer tokens and passwords in URLs."""
    for secret, masked in _MASKS:
        text = secret.sub(masked, text)
    return text


class MaskedStream:
    """A text stream that masks what is written to it. Logs are written a line or a traceback at a time, so that no
    secret is split between two writes.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Returns the length of `text`, as callers expect."""
        self._stream.write(mask(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
