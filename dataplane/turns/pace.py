"""How fast a slot prefills, as its last turns show. Pure."""

import math
import operator
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from dataplane.engine import TurnRecord

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


def prefill_pace(turns: Iterable[TurnRecord]) -> PrefillPace:
    """The pace seen in the last turns: a line by least squares, its slope drawn to the default where the prompts'
    lengths say little of it (ridge regression around a prior); and what a switch took beyond it.
    """
    prefills = [turn for turn in turns if turn.kind == "prefill" and turn.tokens]
    plain = [turn for turn in prefills if not turn.switched] or prefills
    switched = [turn for turn in prefills if turn.switched]
    if not plain:
        return _UNSEEN
    tokens = [turn.prompt_tokens / turn.tokens for turn in plain]
    took_s = [(turn.ended_s - turn.started_s) / turn.tokens for turn in plain]
    mean_tokens, mean_s = sum(tokens) / len(plain), math.fsum(took_s) / len(plain)
    off = [count - mean_tokens for count in tokens]
    spread = sum(map(operator.mul, off, off))
    together = sum(map(operator.mul, off, [s - mean_s for s in took_s]))
    slope_s = (together + _LENGTHS_KNOWN * _UNSEEN.token_s) / (spread + _LENGTHS_KNOWN)
    token_s = min(max(slope_s, 0.0), mean_s / mean_tokens)
    pace = PrefillPace(base_s=mean_s - token_s * mean_tokens, token_s=token_s)
    if not switched:
        return pace
    base_s = pace.base_s
    extra_s = sum([t.ended_s - t.started_s - (t.tokens * base_s + t.prompt_tokens * token_s) for t in switched])
    return replace(pace, switch_s=max(0.0, extra_s) / len(switched))
