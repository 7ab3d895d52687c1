"""Steps that decode a model's batch and prefill some of its waiting prompts beside it: chunked prefill in mixed
batches, as in Sarathi-Serve and vLLM. Pure.

Prompts beside a batch slow that batch alone: they take no time from the turns of others. A turn of q seconds makes
q / t tokens in steps of t seconds; they last until the next turn if t is at most the step without prompts over the load
of the round, which is what its batches and the switches between them need of the time that tokens last. With one batch
that is its tightest time between tokens.

In a round of single steps each token of a batch waits for a step of every other batch, so that long prompts of several
models would make it wait for all of their pieces. The models share the tokens that one step may prefill.

A step that prefills beside always prefills `PIECE_TOKENS_MIN` tokens, however little time is spare: every prompt makes
progress. Where the load leaves no time, or prompts that are nearly due would get less than prefill's share of it,
nothing is mixed, and the turn policy decides between the two kinds.
"""

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from dataplane.scheduling.costs import CostEstimate
from dataplane.scheduling.decode import BatchFacts
from dataplane.scheduling.prefill import PrefillGroup, PrefillSettings

PIECE_TOKENS_MIN = 64
"""Tokens that a mixed step prefills at least, if so many wait."""


def step_budget_s(batches: Iterable[BatchFacts], model: str, *, alpha: float) -> float:
    """How long the steps of a model's batch may take, so that its tokens last until its next turn; less than the step
    takes by itself if the batches leave no time.

    Args:
        batches: those of the slot.
        model: the one whose step it is; its batch must be one of them, and able to run.
        alpha: the load of the slot: of the planned round, with the switches between the batches, or as measured, with
            prefills and waits.
    """
    running = [batch for batch in batches if batch.can_run]
    load = sum([batch.step_s / batch.tbt_s for batch in running])
    if len(running) > 1 and any(batch.switch_s for batch in running):
        load = max(load, alpha)
    return next(batch.step_s for batch in running if batch.model == model) / load


def keeps_up(budget_s: float, step_s: float, prefill_share: float) -> bool:
    """Whether prompts beside a batch get at least their share of the time of its steps."""
    return (budget_s - step_s) * (1 - prefill_share) >= step_s * prefill_share


def group_beside(
    groups: Sequence[PrefillGroup], model: str, now_s: float, settings: PrefillSettings
) -> PrefillGroup | None:
    """The model's first group in order, None if it has none. Batch requests are not prefilled beside a batch while
    interactive ones of any model wait.
    """
    keyed = [(group.key(now_s, settings), group) for group in groups]
    front = min([key[0] for key, _ in keyed], default=0)
    own = [(key, group) for key, group in keyed if group.model == model and key[0] == front]
    return min(own, key=lambda one: one[0])[1] if own else None


class Prompt(Struct, frozen=True):
    """A prompt, or the rest of one: tokens with keys and values, and without."""

    cached: int
    pending: int


class MixedStepFacts(Struct, frozen=True, kw_only=True):
    """A decode step and the prompts that wait beside it, in order. `budget_s`: how long the step may take; `estimate`:
    of the model's steps; `context_tokens`, `batch`: of what decodes; `tokens_max`: that a step prefills at most,
    `sharers` such steps together.
    """

    prompts: tuple[Prompt, ...]
    budget_s: float
    estimate: CostEstimate
    context_tokens: int
    batch: int
    tokens_max: int
    sharers: int = 1


def choose_prefill_tokens(facts: MixedStepFacts) -> int:
    """How many tokens of the prompts, in order, the step prefills: as many as its budget allows, at least
    `PIECE_TOKENS_MIN`, at most its share of `tokens_max`, and no more than there are.
    """
    estimate = facts.estimate
    tokens_max = min(facts.tokens_max, max(facts.tokens_max // facts.sharers, PIECE_TOKENS_MIN))
    left_s = facts.budget_s - estimate.mixed_s(0, 0, facts.context_tokens, facts.batch)
    token_s, token2_s = estimate.mixed_token_s
    tokens = waiting = 0
    for prompt in facts.prompts:
        if waiting >= tokens_max:
            break
        count = min(prompt.pending, tokens_max - waiting)
        if tokens == waiting:  # all before it fit
            slope_s = token_s + 2 * token2_s * prompt.cached
            fits = _fitting(left_s, slope_s, token2_s, count)
            left_s -= slope_s * fits + token2_s * fits**2
            tokens += fits
        waiting += count
    return max(tokens, min(PIECE_TOKENS_MIN, waiting))


def _fitting(left_s: float, slope_s: float, token2_s: float, most: int) -> int:
    """The most tokens, at most `most`, with `slope_s` x tokens + `token2_s` x tokens^2 <= `left_s`."""
    if left_s < 0:
        return 0
    if slope_s * most + token2_s * most**2 <= left_s:
        return most
    root = 2 * left_s / (slope_s + math.sqrt(slope_s**2 + 4 * token2_s * left_s))
    return min(most - 1, int(root))
