"""Tool calls in the text of an answer: found by their markers, reported as they come, and all other text as content."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dataplane.agent.parsing.calls import CallReader, Piece
from dataplane.agent.parsing.reasoning import divided
from dataplane.protocol.messages import ToolCallDelta

MakeReader = Callable[[Callable[[str], bool], str], CallReader]
"""A reader of one call, from a check of its name and the first character behind the marker."""

NAME_CHARS_MAX = 256
REREAD_CHARS_MAX = 2**16
"""Of an answer, behind markers whose calls failed: calls in calls would each be read to their ends."""

_State = Literal["content", "opened", "call", "after"]


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a family writes calls. `openings`: markers of a call, or of a list of calls. `closings`: what may follow a
    call, and is no content. `lists`: calls may be elements of a JSON list. `bare`: an answer may begin with a call that
    has no marker. `known`: the name must be one of the request's functions, as it must be in a bare call.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    reader: MakeReader
    lists: bool = False
    bare: bool = False
    known: bool = False


class ToolCallParser:
    """Divides text into content and calls. `calls`: how many began. Unless `parallel`, the first call ends the text,
    and `stopped` is set then. A malformed call is content, except for markers that are special tokens (`special`),
    which never are, and calls may begin in it, as far as `REREAD_CHARS_MAX` goes. Blanks before and between calls are
    neither.
    """

    def __init__(
        self, form: CallFormat, names: frozenset[str], *, parallel: bool, special: frozenset[str] = frozenset()
    ) -> None:
        self._form = form
        self._names = names
        self._parallel = parallel
        self._special = special
        self._state: _State = "content"
        self._bare = form.bare
        """Whether a call without a marker may begin the pending text."""
        self._blanks: list[str] = []
        """Those before the pending text, in pieces, each of which is looked at once: there may be very many."""
        self._pending = ""
        self._raw: list[str] = []
        """The text of a call that is not reported yet: the first `_marked` characters are its marker."""
        self._marked = self._reread = 0
        self._known = self._in_list = self._reported = False
        self._reader: CallReader | None = None
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self.calls = 0
        self.stopped = False

    @property
    def called(self) -> bool:
        """Whether there are calls, and the last of them was not cut."""
        cut = self._reported and self._reader is not None and not self._reader.whole
        return self.calls > 0 and not cut

    def feed(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """The content and the calls that are certain with more text."""
        self._pending += text
        while not self.stopped and self._step():
            pass
        return self._taken()

    def _step(self) -> bool:
        """Use some of the pending text; False when more is needed."""
        match self._state:
            case "content":
                return self._scan()
            case "opened":
                return self._open()
            case "call":
                return self._read()
            case "after":
                return self._close()

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """What was held back, when no text follows."""
        if not self._reported and not self.stopped:
            held = "".join([*self._raw, *self._blanks, self._pending])
            self._add_content(held if held.strip() or not self.calls else "")
        self._raw, self._blanks, self._pending = [], [], ""
        return self._taken()

    def _taken(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        taken = "".join(self._content), tuple(self._deltas)
        self._content, self._deltas = [], []
        return taken

    def _add_content(self, text: str) -> None:
        for marker in self._special:
            text = text.replace(marker, "")
        if text:
            self._content.append(text)

    def _scan(self) -> bool:
        """Content up to the next marker. Blanks at its end are held back: they may be before a call."""
        if self._bare:
            self._blanks.append(self._pass_blanks())
            if not self._pending:
                return False
            self._bare = False
            if self._pending[0] == "{" or (self._form.lists and self._pending[0] == "["):
                blanks = self._take_blanks()
                self._begin(blanks, self._pending, marked=len(blanks) + 1, known=True)
                return True
        text = self._pending
        found = [(at, opening) for opening in self._form.openings if (at := text.find(opening)) >= 0]
        if found:
            at, opening = min(found)
            before = text[:at].rstrip()
            if before:
                self._add_content(self._take_blanks() + before)
            marker = self._take_blanks() + text[len(before) : at + len(opening)]
            self._begin(marker, text[at + len(opening) :], marked=len(marker), known=self._form.known)
            return True
        sure, blanks, self._pending = divided(text, self._form.openings)
        if sure:
            self._add_content(self._take_blanks() + sure)
        self._blanks.append(blanks)
        return False

    def _take_blanks(self) -> str:
        blanks = "".join(self._blanks)
        self._blanks.clear()
        return blanks

    def _pass_blanks(self) -> str:
        """Take the blanks at the beginning of the pending text off it."""
        text = self._pending.lstrip()
        blanks, self._pending = self._pending[: len(self._pending) - len(text)], text
        return blanks

    def _begin(self, marker: str, rest: str, *, marked: int, known: bool) -> None:
        self._raw, self._marked, self._known = [marker], marked, known
        self._pending, self._state = rest, "opened"

    def _open(self) -> bool:
        """Begin a call, or the list that it is in."""
        self._raw.append(self._pass_blanks())
        text = self._pending
        if not text:
            return False
        if text[0] == "[" and self._form.lists and not self._in_list:
            self._in_list = True
            self._raw.append("[")
            self._pending = text[1:]
            return True
        self._reader = self._form.reader(self._accepts, text[0])
        self._state = "call"
        return True

    def _accepts(self, name: str) -> bool:
        """Whether a name can be that of a function."""
        return name in self._names if self._known else bool(name.strip()) and len(name) <= NAME_CHARS_MAX

    def _read(self) -> bool:
        """More of a call. One that failed is read again as content, behind its marker."""
        reader, text = self._reader, self._pending
        assert reader is not None
        if not text:
            return False
        pieces = reader.feed(text)
        if not self._reported:
            self._raw.append(text[: len(text) - len(reader.rest)])
        self._pending = reader.rest
        if reader.failed:
            raw = "".join(self._raw)
            self._reread += len(raw) - self._marked
            sure = self._marked if self._reread <= REREAD_CHARS_MAX else len(raw)
            self._add_content(raw[:sure])
            self._pending = raw[sure:] + self._pending
            self._raw, self._in_list, self._state = [], False, "content"
            return True
        self._report(pieces)
        if not reader.done:
            return False
        self._reported = False
        self._state = "after"
        self.stopped = not self._parallel
        return True

    def _report(self, pieces: list[Piece]) -> None:
        for name, arguments in pieces:
            if name is not None:
                self._raw, self._reported = [], True
                self.calls += 1
                self._deltas.append(ToolCallDelta(index=self.calls - 1, name=name))
            elif self._deltas and self._deltas[-1].name is None and self._deltas[-1].index == self.calls - 1:
                merged = self._deltas[-1].arguments + arguments
                self._deltas[-1] = ToolCallDelta(index=self.calls - 1, arguments=merged)
            elif arguments:
                self._deltas.append(ToolCallDelta(index=self.calls - 1, arguments=arguments))

    def _close(self) -> bool:
        """What follows a call: closing markers, another call, or content."""
        self._pass_blanks()
        text = self._pending
        if not text:
            return False
        for closing in self._form.closings:
            if text.startswith(closing):
                self._pending = text.removeprefix(closing)
                self._in_list = self._in_list and closing != "]"
                return True
        for opening in self._form.openings:
            if text.startswith(opening):
                self._begin(opening, text.removeprefix(opening), marked=len(opening), known=self._form.known)
                self._in_list = False
                return True
        if any(marker.startswith(text) for marker in (*self._form.openings, *self._form.closings)):
            return False
        if text[0] == "{" and (self._in_list or self._form.bare):
            self._begin("", text, marked=1, known=self._known)
            return True
        self._in_list, self._state = False, "content"
        return True
