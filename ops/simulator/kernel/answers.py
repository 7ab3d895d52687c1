"""How many tokens answers still have to come: expected by those that ended, as nodes and gateways count live, or true.

Expected ones are the live function's (`dataplane.protocol.answer_lengths`), of which a table is kept: exact where its
classes begin, on straight lines between them, and made anew when enough answers have ended. All instances of a model
and all gateways learn together, at a tick, from the answers that ended since the table was made.
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

import numpy as np

from dataplane.protocol.answer_lengths import AnswerLengths
from ops.simulator.kernel.requests import Served

_RENEWED_AFTER_MAX = 512
"""The table is made anew when more answers have ended than it knows of, or more than this."""
_LAST_S = attrgetter("last_s")
_NO_LIMIT = 2**30
"""Requests come without `max_tokens`."""


class Unfinished(Protocol):
    """Answers that are being made."""

    @property
    def left(self) -> int:
        """The tokens that they will all still have in truth."""

    def summed(self, rests: Sequence[int]) -> int:
        """The sum of what `rests` says of the tokens that each has; its last value is of any more."""


class Answers(Protocol):
    """The answers of one model."""

    def rest(self, made: int, left: int) -> int:
        """The tokens that an answer still has to come: it has `made`, and `left` are left in truth."""

    def rests(self, answers: Unfinished) -> int:
        """The tokens that they all still have to come."""

    def ended(self, served: Served) -> None:
        """An answer has ended."""

    def learn(self) -> None:
        """Learn from the answers that have ended, in whatever order that was noted, if they are enough."""


class TrueAnswers:
    """Answers whose lengths are known beforehand."""

    def rest(self, made: int, left: int) -> int:
        return left

    def rests(self, answers: Unfinished) -> int:
        return answers.left

    def ended(self, served: Served) -> None:
        """There is nothing to learn."""

    def learn(self) -> None:
        """There is nothing to learn."""


class ExpectedAnswers:
    """Answers that are expected to become as long as those that ended."""

    def __init__(self) -> None:
        self._lengths = AnswerLengths()
        self._longest = self._known = 0
        self._ended: list[Served] = []
        """Those that nobody has learnt from."""
        self._rests = self._table()

    def rest(self, made: int, left: int) -> int:
        rests = self._rests
        return rests[made] if made < len(rests) else rests[-1]

    def rests(self, answers: Unfinished) -> int:
        return answers.summed(self._rests)

    def ended(self, served: Served) -> None:
        self._ended.append(served)

    def learn(self) -> None:
        if len(self._ended) <= min(self._known, _RENEWED_AFTER_MAX):
            return
        self._ended.sort(key=_LAST_S)
        lengths = [served.made for served in self._ended]
        for tokens in lengths:
            self._lengths.note(tokens)
        self._longest = max(self._longest, *lengths)
        self._known += len(lengths)
        self._ended.clear()
        self._rests = self._table()

    def _table(self) -> list[int]:
        """What is to come after each number of tokens up to the longest answer, and after more."""
        points = [0]
        while points[-1] <= self._longest:
            points.append(points[-1] + max(1, points[-1] // 8))
        rests = [self._lengths.rest(made, _NO_LIMIT) for made in points]
        table: list[int] = np.rint(np.interp(np.arange(points[-1] + 1), points, rests)).astype(int).tolist()
        return table


AnswersByModel = defaultdict[str, Answers]


def answers_by_model(*, clairvoyant: bool) -> AnswersByModel:
    """The answers of each model; `clairvoyant`: their true lengths are known beforehand."""
    return defaultdict(TrueAnswers if clairvoyant else ExpectedAnswers)
