"""How many tokens an answer still has to come, by the answers of its model that ended: nodes report their load by it,
and gateways count by it what they have sent and no node has reported yet, so that both halves of a queue have one unit.

The most that a request allows says little: without `max_tokens` that is the rest of the context.
"""

import math
from bisect import bisect_right

_GUESS_TOKENS = 256.0
"""The mean length of answers of which nothing is known: exponentially distributed, so an answer that goes on has as
many to come as at its beginning.
"""
_GUESS_ANSWERS = 4.0
"""How many answers that have ended the guess is worth."""
_MEMORY_ANSWERS = 512
"""The weight of an answer halves with about 0.7 times as many after it."""
_GAIN_MAX = 1e9


def _edges() -> list[int]:
    edges = list(range(17))
    while edges[-1] < 2**22:
        edges.append(edges[-1] + edges[-1] // 8)
    return edges


_EDGES = _edges()
"""Where classes of lengths begin: exact up to 16 tokens, then to an eighth."""


class AnswerLengths:
    """The lengths of one model's answers, recent ones weighing more."""

    def __init__(self) -> None:
        self._counts = [0.0] * len(_EDGES)
        self._tokens = [0.0] * len(_EDGES)
        self._gain = 1.0
        """What an answer that ends now weighs in them."""
        self._beyond: list[tuple[float, float]] | None = None
        """By class, the weight of answers in it and in longer ones, and their tokens."""

    def note(self, tokens: int, *, cut: bool = False) -> None:
        """Record an answer that ended. `cut`: it was cut off at its limit, so it counts as long as answers that get so
        far are in the mean.
        """
        if cut:
            tokens += self.rest(tokens, _EDGES[-1])
        at = _class_of(tokens)
        self._counts[at] += self._gain
        self._tokens[at] += self._gain * tokens
        self._gain *= 1 + 1 / _MEMORY_ANSWERS
        if self._gain > _GAIN_MAX:
            self._counts = [count / self._gain for count in self._counts]
            self._tokens = [tokens / self._gain for tokens in self._tokens]
            self._gain = 1.0
        self._beyond = None

    def rest(self, made: int, most: int) -> int:
        """The mean of the tokens still to come of an answer that has `made` of at most `most` tokens, rounded up."""
        if made >= most:
            return 0
        left = most - made
        guessed = _GUESS_ANSWERS * math.exp(-made / _GUESS_TOKENS) * self._gain
        count, tokens = self._seen(made, most)
        whole = guessed * _GUESS_TOKENS * -math.expm1(-left / _GUESS_TOKENS) + tokens - count * made
        return min(left, max(1, math.ceil(whole / (guessed + count))))

    def _seen(self, made: int, most: int) -> tuple[float, float]:
        """The weight of the answers longer than `made`, and their tokens, of each at most `most`. In the class of
        `made` lengths count as evenly spread.
        """
        if self._beyond is None:
            self._beyond = self._sum_up()
        at, last = _class_of(made), _class_of(most)
        after, tokens_after = self._beyond[at + 1]
        cut, tokens_cut = self._beyond[max(last, at + 1)]
        count, tokens = after, tokens_after - tokens_cut + cut * most
        if inside := self._counts[at]:
            begin, end = _EDGES[at], _EDGES[at + 1]
            longer = inside * (end - 1 - made) / (end - begin)
            count += longer
            tokens += longer * min(most, (made + end) / 2)
        return count, tokens

    def _sum_up(self) -> list[tuple[float, float]]:
        count = tokens = 0.0
        sums = [(0.0, 0.0)]
        for at in reversed(range(len(_EDGES))):
            count += self._counts[at]
            tokens += self._tokens[at]
            sums.append((count, tokens))
        return sums[::-1]


def _class_of(tokens: int) -> int:
    return min(bisect_right(_EDGES, tokens) - 1, len(_EDGES) - 2)
