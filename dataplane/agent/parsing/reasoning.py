"""Reasoning before an answer: the text between two markers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

_State = Literal["start", "opened", "reasoning", "closed", "rest"]


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """`assumed`: the answer begins with reasoning although neither its prompt nor its text opens it."""

    opening: str
    closing: str
    assumed: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.closing


class ReasoningParser:
    """Divides text into reasoning and the rest. Blanks around the markers belong to neither. `opened`: the prompt ended
    with the opening marker.
    """

    def __init__(self, form: ReasoningFormat, *, opened: bool) -> None:
        self._form = form
        self._opened = opened or form.assumed
        self._state: _State = "start"
        self._blanks: list[str] = []
        """Those before the held text, in pieces, each of which is looked at once: there may be very many."""
        self._held = ""

    @property
    def open(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._state in {"opened", "reasoning"} or (self._state == "start" and self._opened)

    def is_over(self) -> bool:
        """Whether all further text is the rest."""
        return self._state == "rest"

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the rest that are certain with more text."""
        if self.is_over():
            return "", text
        self._held += text
        self._advance()
        reasoning = self._take_reasoning() if self._state == "reasoning" else ""
        self._advance()
        rest = ""
        if self.is_over():
            rest = self._take_held()
        return reasoning, rest

    def finish(self) -> tuple[str, str]:
        """The reasoning and the rest that were held back, when no text follows."""
        held = self._take_held()
        return (held, "") if self.open else ("", held)

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return self._take_blanks() + held

    def _take_blanks(self) -> str:
        blanks = "".join(self._blanks)
        self._blanks.clear()
        return blanks

    def _advance(self) -> None:
        """Leave the states that pass blanks and the opening marker, as far as the held text shows that they end."""
        if self._state == "start":
            self._pass_blanks()
            if self._held.startswith(self._form.opening):
                self._state, self._held = "opened", self._held.removeprefix(self._form.opening)
            elif self._form.opening.startswith(self._held):
                return
            else:
                self._state = "opened" if self._opened else "rest"
        if self._state in {"opened", "closed"}:
            self._pass_blanks()
            self._blanks.clear()
            if self._held:
                self._state = "reasoning" if self._state == "opened" else "rest"

    def _pass_blanks(self) -> None:
        text = self._held.lstrip()
        self._blanks.append(self._held[: len(self._held) - len(text)])
        self._held = text

    def _take_reasoning(self) -> str:
        """Reasoning up to the closing marker, or as far as the held text cannot be its beginning."""
        before, marker, after = self._held.partition(self._form.closing)
        if marker:
            self._held, self._state = after, "closed"
            sure, blanks = before.rstrip(), ""
        else:
            sure, blanks, self._held = divided(before, (self._form.closing,))
        reasoning = self._take_blanks() + sure if sure else ""
        self._blanks.append(blanks)
        return reasoning


def divided(text: str, markers: Iterable[str]) -> tuple[str, str, str]:
    """A text in three parts: up to its last letter, blanks, and the longest end that is a beginning of a marker."""
    end = len(text) - max((overlap(text, marker) for marker in markers), default=0)
    sure = text[:end].rstrip()
    return sure, text[len(sure) : end], text[end:]


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, and not all of it."""
    end = text[-len(marker) + 1 :] if len(marker) > 1 else ""
    start = end.find(marker[0])
    while start >= 0:
        if marker.startswith(end[start:]):
            return len(end) - start
        start = end.find(marker[0], start + 1)
    return 0
