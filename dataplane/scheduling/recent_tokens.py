"""The rate of what came in the last minute. Pure: the caller brings the time."""

from collections import deque

SPAN_S = 60


class RecentTokens:
    """Tokens by whole seconds of the last `SPAN_S`. Times are of one clock that does not go back."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()
        self._tokens = 0
        """Of all `_seconds`."""

    def add(self, tokens: int, now_s: float) -> None:
        """Count tokens that came now."""
        second = int(now_s)
        self._tokens += tokens
        if self._seconds and self._seconds[-1][0] == second:
            tokens += self._seconds.pop()[1]
        self._seconds.append((second, tokens))

    def per_s(self, now_s: float) -> float:
        """Tokens per second over the last `SPAN_S` seconds."""
        while self._seconds and self._seconds[0][0] <= int(now_s) - SPAN_S:
            self._tokens -= self._seconds.popleft()[1]
        return self._tokens / SPAN_S
