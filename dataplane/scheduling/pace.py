"""The prefill rate of a slot, measured from its last time slices. Pure."""

from msgspec import Struct

_LENGTHS_KNOWN = 256.0**2
"""Squared deviation of prompt lengths (tokens^2, summed over time slices) at which the measured time per token weighs
as much as the default. Prompts of nearly equal length say little about it: any hiccup would be a slope of seconds.
"""


class PrefillPace(Struct, frozen=True, kw_only=True):
    """Seconds per prompt, per token, and for a switch in addition. The defaults apply until measured."""

    base_s: float = 0.0
    token_s: float = 1e-4
    switch_s: float = 0.5


_UNSEEN = PrefillPace()


class _Sums(Struct):
    """Sums over `turns` prefill slices: their prompts, those prompts' tokens, and seconds; and with x the tokens and y
    the seconds of a slice's mean prompt, the sums of x, y, x x and x y.
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
    """The prefill slices that count now, as sums, so that one is added or removed at constant cost."""

    def __init__(self) -> None:
        self._plain = _Sums()
        self._switched = _Sums()

    def take(self, prompts: int, tokens: int, seconds: float, *, switched: bool) -> None:
        """Add a slice that completed at least one prompt. `switched`: it began with a switch."""
        self._count(1, prompts, tokens, seconds, self._switched if switched else self._plain)

    def forget(self, prompts: int, tokens: int, seconds: float, *, switched: bool) -> None:
        """Remove a slice."""
        self._count(-1, prompts, tokens, seconds, self._switched if switched else self._plain)

    @property
    def pace(self) -> PrefillPace:
        """A line by least squares, its slope shrunk to the default if the prompts' lengths say little about it (ridge
        regression around a prior); and the mean additional time of a switch.
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
