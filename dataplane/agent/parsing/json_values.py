"""Where a JSON value ends, found while its text is still coming."""


class ValueScanner:
    """Finds the end of one JSON value by its quotes and brackets; what is between them is not checked."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, start: int) -> int | None:
        """Where the value ends in `text`, which continues it at `start`; None: not in this text. A number or word ends
        before the character that follows it.
        """
        for at in range(start, len(text)):
            char = text[at]
            if self._in_string:
                if self._ends_string(char) and not self._depth:
                    return at + 1
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1 + self._depth
            elif not self._depth and (char == "," or char.isspace()):
                return at
        return None

    def _ends_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
        return not self._in_string
