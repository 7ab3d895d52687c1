"""Which tokens may come next in one answer, followed from its tokens alone: nothing else has to survive a node."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

from dataplane.constraints.deep_threads import deep_threads

_THREADS_MAX = 8
_ALLOWED = b"\xc8"
"""What llguidance writes for a token that is allowed; it writes 0 for others."""

_NO_MATCH = "doesn't satisfy the grammar"
"""What llguidance says of tokens that a constraint does not allow."""


class Matcher:
    """One answer under a constraint, as a mask for each of its next tokens.

    `prepare` follows the answer and begins to compute the mask, on another thread; `mask` waits for it. `error` is set
    when the answer does not match, or a mask takes more than the limits allow: then no token is allowed.
    """

    def __init__(self, matcher: Any, *, size: int, eos_ids: frozenset[int], prompt_tokens: int) -> None:
        """`matcher`: a llguidance matcher at its start, used by nobody else; `size`: of the vocabulary."""
        self._matcher = matcher
        self._size = size
        self.eos_ids = eos_ids
        self._followed = prompt_tokens
        self._mask = b""
        self._future: Future[None] | None = None
        self.error: str | None = None
        self.too_complex = False
        """Whether a limit is the `error`, so that no engine can make the answer."""
        self.must_end = False
        """Whether the mask allows nothing but the end of the answer."""
        self.may_end = False
        """Whether it allows that."""

    def mask(self, tokens: Sequence[int]) -> bytes:
        """One byte for each token of the vocabulary, 0 if it may not follow `tokens`, a whole prompt and answer."""
        prepare([(self, tokens)])
        self.wait()
        return self._mask

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether the mask after `tokens` is still to be computed."""
        return len(tokens) > self._followed or (not self._mask and self._future is None)

    def follow_in(self, future: Future[None]) -> None:
        """A call of `follow` is under way, for which `mask` waits."""
        self._future = future

    def wait(self) -> None:
        """Wait for the call of `follow` that is under way, if one is."""
        if self._future is not None:
            self._future.result()
            self._future = None

    def follow(self, tokens: Sequence[int]) -> None:
        """Follow an answer up to its end, and compute the mask of what may come next."""
        new = list(tokens[self._followed :])
        self._followed = len(tokens)
        mask = b""
        if self.error is None and self._matcher.consume_tokens(new):
            mask = self._matcher.compute_logit_bias()
        if self.error is None and self._matcher.is_error():
            self._note_error(first_line(self._matcher.get_error()))
        self._mask = mask.ljust(self._size, b"\0")[: self._size] if self.error is None else bytes(self._size)
        ends = sum(self._mask[token] > 0 for token in self.eos_ids if token < self._size)
        self.may_end = ends > 0
        self.must_end = 0 < ends == self._mask.count(_ALLOWED)

    def _note_error(self, reason: str) -> None:
        self.too_complex = _NO_MATCH not in reason
        what = (
            "its constraint is too complex" if self.too_complex else "the answer so far does not match its constraint"
        )
        self.error = f"{what}: {reason}"


def prepare(answers: Iterable[tuple[Matcher, Sequence[int]]]) -> None:
    """Begin to compute the masks after prompts and answers, given as the sequences' tokens, concurrently."""
    wanted = [(matcher, tokens) for matcher, tokens in answers if matcher.wants(tokens)]
    if not wanted:
        return
    pool = _threads()
    groups = [wanted[first :: _thread_count()] for first in range(min(_thread_count(), len(wanted)))]
    for group in groups:
        for matcher, _ in group:
            matcher.wait()  # for that of a step that failed
        future = pool.submit(_follow_all, group)
        for matcher, _ in group:
            matcher.follow_in(future)


def allowed_from(mask: bytes, first: int) -> Iterator[int]:
    """The tokens that a mask allows, those from `first` on first."""
    for begin, end in ((first, len(mask)), (0, first)):
        at = mask.find(_ALLOWED, begin, end)
        while at >= 0:
            yield at
            at = mask.find(_ALLOWED, at + 1, end)


def _follow_all(group: Sequence[tuple[Matcher, Sequence[int]]]) -> None:
    for matcher, tokens in group:
        matcher.follow(tokens)


def first_line(text: str) -> str:
    """The first line of an error of llguidance, which goes on with the state of the parser."""
    return text.strip().partition("\n")[0]


def _thread_count() -> int:
    return max(1, min(_THREADS_MAX, (os.cpu_count() or 1) // 2))


@cache
def _threads() -> ThreadPoolExecutor:
    return deep_threads(_thread_count(), "masks")
