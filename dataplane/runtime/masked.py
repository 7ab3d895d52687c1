"""No secret in logs: what a process writes to its standard error goes through here."""

import re
from typing import IO, Any

_MASKS = (
    (re.compile(r"(?i)(bearer\s+)[^\s'\",]+"), r"\1***"),
    (re.compile(r"\b(tp-[a-z]+-)[A-Za-z0-9_-]{8,}"), r"\1***"),
    (re.compile(r"(://[^\s/:@]*:)[^\s/@]+@"), r"\1***@"),
)


def mask(text: str) -> str:
    """The text without API keys, bearer tokens and passwords of addresses."""
    for secret, masked in _MASKS:
        text = secret.sub(masked, text)
    return text


class MaskedStream:
    """A text stream that masks what is written to it; all else it hands on. Logs are written a line, or a traceback, at
    a time, so no secret is cut in two.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what may be seen; returns the length of what came."""
        self._stream.write(mask(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        """Everything but writing."""
        return getattr(self._stream, name)
