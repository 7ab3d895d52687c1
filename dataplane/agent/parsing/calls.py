"""Readers of tool calls, from the text behind a marker as it comes.

A reader is given text until `done` or `failed` is set; `rest` is then what it did not use. The name of a call is
reported when its arguments begin. Until then a reader may fail, and has reported nothing; afterwards it never does.
"""

import json
import re
from collections.abc import Callable
from typing import Protocol

from dataplane.agent.parsing.json_values import ValueScanner

HEADER_CHARS_MAX = 256
"""Of the text between a marker and the arguments of a call."""

Piece = tuple[str | None, str]
"""The name of a call that begins, or more of its arguments."""

_NAME = {"name", "function"}
_ARGUMENTS = {"arguments", "parameters"}
_KEYS = {*_NAME, *_ARGUMENTS, "id", "type"}


class CallReader(Protocol):
    """Reads one call. `whole`: its arguments have ended, even if the call itself has not."""

    done: bool
    failed: bool
    rest: str

    @property
    def whole(self) -> bool: ...

    def feed(self, text: str) -> list[Piece]:
        """More of the call."""


class JsonCallReader:
    """A call as a JSON object: `{"name": ..., "arguments": {...}}`, or with `parameters`; where it has several, the
    first are its arguments. `accepts` tells whether a name can be that of a function.
    """

    def __init__(self, accepts: Callable[[str], bool]) -> None:
        self.done = self.failed = False
        self.rest = ""
        self._accepts = accepts
        self._expected = "{"
        self._scanner: ValueScanner | None = None
        self._value: list[str] = []
        self._key = ""
        self._name: str | None = None
        self._early: str | None = None
        """Arguments that came before the name."""
        self._streams = self._reported = False

    @property
    def whole(self) -> bool:
        return self._reported and not self._streams

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        while at < len(text) and not self.done and not self.failed:
            if self._scanner is None:
                at = self._structure(text, at)
                continue
            end = self._scanner.scan(text, at)
            part = text[at:end]
            if self._streams:
                self._report(part, pieces)
            else:
                self._value.append(part)
            at = len(text) if end is None else end
            if end is not None:
                self._scanner = None
                self._end_of_value(pieces)
        self.rest = text[at:]
        if self.done and not self.failed:
            self._end(pieces)
        return pieces

    def _structure(self, text: str, at: int) -> int:
        """Pass one character outside of keys and values, or begin one; where to go on."""
        char = text[at]
        if char.isspace():
            return at + 1
        if self._expected in {"key", "value"} and not (self._expected == "key" and char != '"'):
            self._scanner, self._value = ValueScanner(), []
            wanted = self._expected == "value" and self._key in _ARGUMENTS and not self._reported
            self._streams = wanted and self._name is not None and char in "{["
            return at
        if char == self._expected == "{":
            self._expected = "key"
        elif char == self._expected == ":":
            self._expected = "value"
        elif char == self._expected == ",":
            self._expected = "key"
        elif char == "}" and self._expected in {",", "key"}:
            self.done = True
        elif self._reported:  # the closing brace is missing
            self.done = True
            return at
        else:
            self.failed = True
            return at
        return at + 1

    def _end_of_value(self, pieces: list[Piece]) -> None:
        if self._streams:
            self._streams = False
            self._expected = ","
            return
        text = "".join(self._value)
        try:
            value = json.loads(text)
            if isinstance(value, str) and self._expected != "key":
                value.encode()  # half of a surrogate pair, which JSON can spell, cannot be sent to anyone
        except (ValueError, RecursionError):
            self.failed = not self._reported
            self._expected = ","
            return
        if self._expected == "key":
            self._key, self._expected = str(value), ":"
            self.failed = not self._reported and self._key not in _KEYS
            return
        self._expected = ","
        if self._key in _NAME:
            self._name = value if isinstance(value, str) else ""
            self.failed = not self._reported and not self._accepts(self._name)
        elif self._key in _ARGUMENTS and not self._reported and self._early is None:
            # Arguments as text are JSON twice; null stands for none.
            self._early = value if isinstance(value, str) else "{}" if value is None else text
        if self._name and self._early is not None and not self.failed:
            self._report(self._early, pieces)
            self._early = None

    def _end(self, pieces: list[Piece]) -> None:
        """A call without arguments has empty ones."""
        if self._reported:
            return
        if self._name is None:
            self.failed = True
        else:
            self._report("{}", pieces)

    def _report(self, arguments: str, pieces: list[Piece]) -> None:
        if not self._reported:
            pieces.append((self._name, ""))
            self._reported = True
        pieces.append((None, arguments))


class NamedCallReader:
    """A call as a name and its arguments: `header` matches the text before the brace, and its group is the name."""

    def __init__(self, header: re.Pattern[str], accepts: Callable[[str], bool]) -> None:
        self.done = self.failed = False
        self.rest = ""
        self._header = header
        self._accepts = accepts
        self._before = ""
        self._scanner: ValueScanner | None = None

    @property
    def whole(self) -> bool:
        return self.done

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        if self._scanner is None:
            before, brace, after = text.partition("{")
            left = HEADER_CHARS_MAX - len(self._before)
            if len(before) > left:
                self.failed, self.rest = True, text[left:]
                return pieces
            self._before += before
            if not brace:
                return pieces
            found = self._header.fullmatch(self._before)
            if found is None or not self._accepts(found[1]):
                self.failed, self.rest = True, brace + after
                return pieces
            pieces.append((found[1], ""))
            self._scanner, text = ValueScanner(), brace + after
        end = self._scanner.scan(text, 0)
        pieces.append((None, text[:end]))
        if end is not None:
            self.done, self.rest = True, text[end:]
        return pieces
