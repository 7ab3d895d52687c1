"""How fast a slot prefills, as its last turns show. Pure."""

from msgspec import Struct

_LENGTHS_KNOWN = 256.0**2
"""Squared deviation of prompt lengths (tokens^2, summed over turns) at which what they show of the time a token weighs
as much as the default. Prompts of nearly one length show next to nothing: any hiccup would be a slope of seconds.
"""


class PrefillPace(Struct, frozen=True, kw_only=True):
    """Seconds a prompt, a token, and a switch on top. The defaults stand until seen."""

    base_s: float = 0.0
    token_s: float = 1e-4
    switch_s: float = 0.5

    def of(self, tokens: int) -> float:
        """Seconds for a prompt of so many tokens, without a switch."""
        return self.base_s + tokens * self.token_s


_UNSEEN = PrefillPace()


class _Sums(Struct):
    """Of `turns` turns: their prompts, those prompts' tokens, and seconds; and with x the tokens and y the seconds of a
    turn's mean prompt, the sums of x, y, x x and x y.
    """

    turns: int = 0
    prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0


class SeenPrefills:
    """The prefill turns that count now, as sums: a turn is taken in and out at the same small cost, however many."""

    def __init__(self) -> None:
        self._plain = _Sums()
        self._switched = _Sums()

    def take(self, prompts: int, tokens: int, seconds: float, *, switched: bool) -> None:
        """A turn ended so many prompts, at least one, of so many tokens together. `switched`: it began by a switch."""
        self._count(1, prompts, tokens, seconds, self._switched if switched else self._plain)

    def forget(self, prompts: int, tokens: int, seconds: float, *, switched: bool) -> None:
        """One that was taken in counts no more."""
        self._count(-1, prompts, tokens, seconds, self._switched if switched else self._plain)

    @property
    def pace(self) -> PrefillPace:
        """A line by least squares, its slope drawn to the default where the prompts' lengths say little of it (ridge
        regression around a prior); and what a switch took beyond it.
        """
        seen, switched = self._plain if self._plain.turns else self._switched, self._switched
        if not seen.turns:
            return _UNSEEN
        mean_tokens, mean_s = seen.x / seen.turns, seen.y / seen.turns
        spread = max(seen.xx - seen.x * mean_tokens, 0.0)
        together = seen.xy - seen.x * mean_s
        slope_s = (together + _LENGTHS_KNOWN * _UNSEEN.token_s) / (spread + _LENGTHS_KNOWN)
        token_s = min(max(slope_s, 0.0), mean_s / mean_tokens)
        base_s, switch_s = mean_s - token_s * mean_tokens, _UNSEEN.switch_s
        if switched.turns:
            extra_s = switched.seconds - switched.prompts * base_s - switched.tokens * token_s
            switch_s = max(0.0, extra_s) / switched.turns
        return PrefillPace(base_s=base_s, token_s=token_s, switch_s=switch_s)

    @staticmethod
    def _count(sign: int, prompts: int, tokens: int, seconds: float, sums: _Sums) -> None:
        x, y = tokens / prompts, seconds / prompts
        sums.turns += sign
        sums.prompts += sign * prompts
        sums.tokens += sign * tokens
        sums.seconds += sign * seconds
        sums.x += sign * x
        sums.y += sign * y
        sums.xx += sign * x * x
        sums.xy += sign * x * y
