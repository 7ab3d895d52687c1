"""Weighted round robin over the decode batches of a slot (Aegaeon 4.3, algorithm 2, equations 2 and 3). Pure.

A round gives each model's batch one turn. Decoding for its quota q at t seconds per step makes q / t tokens, which
last q n seconds at a target of d seconds per token (n = d / t); all quotas are chosen so that they last equally long.
The paper leaves open: a model has at most one turn per round; one that joins gets the next turn; one that cannot run
loses its turn, and joins again when it can; the only model has turn after turn.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace


class BatchFacts(Struct, frozen=True, kw_only=True):
    """The decode batch of one model. Several batches of one model that alternate step by step count as one, `step_s`
    the sum.

    `tbt_s`: the tightest target in it. `switch_s`: how long its weights take to load in each round (0 if they stay
    resident between its turns), `prefetched` if they are loaded during the turn before. `ready` False: its weights are
    not in host memory yet. `slack_s`: time until the most urgent sequence misses its next token's deadline, negative if
    it is late. `background`: all of its sequences are batch requests.
    """

    model: str
    sequences: int
    step_s: float
    tbt_s: float
    switch_s: float
    prefetched: bool = False
    ready: bool = True
    slack_s: float = 0.0
    background: bool = False

    def __post_init__(self) -> None:
        assert self.step_s > 0
        assert self.tbt_s > 0
        assert self.switch_s >= 0

    @property
    def can_run(self) -> bool:
        return self.ready and self.sequences > 0


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """`quota_max_s`: the paper's Q_MAX. `quota_min_s`: minimum of a quota, even if a switch costs nothing.
    `step_by_step`: in rounds without switches quotas have no minimum, and turns are of whole steps.
    """

    quota_max_s: float = 4.0
    quota_min_s: float = 0.05
    alpha_min: float = 0.5
    step_by_step: bool = False

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: a setting is out of range; the message names it.
        """
        if not 0 < self.quota_min_s <= self.quota_max_s:
            raise ValueError(f"quota_min_s must be over 0 and at most quota_max_s, not {self.quota_min_s}")
        if not self.alpha_min > 0:
            raise ValueError(f"alpha_min must be over 0, not {self.alpha_min}")


_WHOLE = 1 - 1e-6
"""What is left of a turn is a whole step if it is this much of one: times are sums of others."""


class Quota(Struct, frozen=True, kw_only=True):
    """How long a model decodes in its turn, without its switch. No step begins in the last `early_s` of it: with half
    of a step, a turn has the number of steps that is nearest to the quota.
    """

    model: str
    quota_s: float
    early_s: float = 0.0


class Round(Struct, frozen=True, kw_only=True):
    """`alpha` is the reciprocal of the estimated attainment: min(1, 1 / alpha) of the tokens are made in time."""

    quotas: tuple[Quota, ...]
    alpha: float


def plan_round(batches: Sequence[BatchFacts], settings: DecodeSettings) -> Round:
    """Quotas by equations 2 and 3 for batches of different models that can run, in their order.

    Equation 2 is q_i = B / n_i, B being how long the tokens of a turn last; a round then takes c + B sum 1/n, and alpha
    is that time over B. Equation 3 is alpha at B = min(n) Q_MAX, or `alpha_min`, and B the least that gives this alpha:
    c / (alpha - sum 1/n). The part of a prefetched switch that is hidden by the turn before it does not count in c,
    which thus depends on B. B is increased until each quota is at least `quota_min_s` and one step, as far as none
    exceeds `quota_max_s`; a quota is at least one step. If tokens then last less long than the round, alpha shows it.
    Step by step, a round without switches is as short as one step of each batch allows.
    """
    assert batches
    n = [batch.tbt_s / batch.step_s for batch in batches]
    shares = [1 / n_k for n_k in n]
    share = sum(shares)
    switches = [
        Switch(time_s=batch.switch_s, hidden_share=shares[index - 1] if batch.prefetched and len(batches) > 1 else 0.0)
        for index, batch in enumerate(batches)
        if batch.switch_s
    ]
    lasting_max_s = min(n) * settings.quota_max_s
    alpha = max(exposed_s(switches, lasting_max_s) / lasting_max_s + share, settings.alpha_min)
    by_step = settings.step_by_step and not switches
    least_s = 0.0 if by_step else settings.quota_min_s
    floor_s = max([n_k * max(batch.step_s, least_s) for n_k, batch in zip(n, batches, strict=True)])
    lasting_s = min(max(least_lasting_s(switches, alpha - share), floor_s), lasting_max_s)
    quotas_s = [max(lasting_s * share, batch.step_s) for share, batch in zip(shares, batches, strict=True)]
    round_s = exposed_s(switches, lasting_s) + sum(quotas_s)
    shortest_s = min([n_k * quota_s for n_k, quota_s in zip(n, quotas_s, strict=True)])
    return Round(
        quotas=tuple(
            [
                Quota(model=batch.model, quota_s=quota_s, early_s=batch.step_s / 2 if by_step else 0.0)
                for batch, quota_s in zip(batches, quotas_s, strict=True)
            ]
        ),
        alpha=max(alpha, round_s / shortest_s),
    )


class Switch(Struct, frozen=True, kw_only=True):
    """A switch of a round. It is hidden for `hidden_share` of B, by the turn before it; 0 if it is not prefetched."""

    time_s: float
    hidden_share: float


def exposed_s(switches: Iterable[Switch], lasting_s: float) -> float:
    """c: the time of a round's switches that is not hidden, if the tokens of a turn last `lasting_s`."""
    return sum([max(0.0, switch.time_s - lasting_s * switch.hidden_share) for switch in switches])


def least_lasting_s(switches: Sequence[Switch], spare: float) -> float:
    """The least B with `exposed_s` = B x `spare`, infinite if there is none.

    The left side is decreasing, convex and piecewise linear: Newton's steps from 0 go from piece to piece.
    """
    lasting_s = 0.0
    while switches:
        exposed = [switch for switch in switches if switch.time_s > lasting_s * switch.hidden_share]
        share = spare + sum([switch.hidden_share for switch in exposed])
        total_s = sum([switch.time_s for switch in exposed])
        if total_s <= lasting_s * share * (1 + 1e-9):
            return lasting_s
        if share <= 0:
            return math.inf
        lasting_s = total_s / share
    return lasting_s


class RoundState(Struct, frozen=True, kw_only=True):
    """The state of a round: past turns, the present one at `position`, and future ones.

    `ends_s`: when the present turn's quota is used up. `patience_s`: how much more of its waiting does not count.
    `alpha`: the highest of the plans made for this round, the slot's load; 0 if nothing decodes.
    """

    quotas: tuple[Quota, ...] = ()
    position: int = 0
    ends_s: float = 0.0
    patience_s: float = 0.0
    alpha: float = 0.0

    @property
    def model(self) -> str | None:
        return self.quotas[self.position].model if self.quotas else None

    @property
    def is_by_step(self) -> bool:
        """Whether the present turn was planned step by step."""
        return bool(self.quotas) and self.quotas[self.position].early_s > 0

    def later(self, seconds: float) -> "RoundState":
        """The state after something else took `seconds` of the present turn."""
        return replace(self, ends_s=self.ends_s + seconds) if seconds else self

    def waited(self, seconds: float) -> "RoundState":
        """The state after the present turn only waited for `seconds`: they do not count while it has patience."""
        forgiven_s = min(seconds, self.patience_s)
        return replace(self.later(forgiven_s), patience_s=self.patience_s - forgiven_s)


def idle_s(state: RoundState, model: str, now_s: float) -> float:
    """Seconds until a model's turn, by the quotas alone, without prefills and switches. 0 during its turn, and for one
    that is in no round, because a model that joins gets the next turn.
    """
    names = [quota.model for quota in state.quotas]
    if model not in names or model == state.model:
        return 0.0
    at = names.index(model)
    until = state.quotas[state.position + 1 :] + state.quotas[:at]
    if at > state.position:
        until = state.quotas[state.position + 1 : at]
    return max(state.ends_s - now_s, 0.0) + sum(quota.quota_s for quota in until)


class DecodeTurn(Struct, frozen=True, kw_only=True):
    """Decode this model; then `next_model`, None if none follows."""

    model: str
    next_model: str | None


def choose_decode_turn(
    batches: Iterable[BatchFacts], state: RoundState, now_s: float, settings: DecodeSettings
) -> tuple[DecodeTurn | None, RoundState]:
    """The batch to decode now, None if none can run. A turn that begins ends at `now_s` + its quota; the caller extends
    it by the time of a switch or a prefill (`later`).
    """
    runnable = {batch.model: batch for batch in batches if batch.can_run}
    if not runnable:
        return None, RoundState()
    if state.model not in runnable or now_s >= state.ends_s:
        state = _advance(runnable, state, now_s, settings)
    assert state.model is not None
    following = None if len(runnable) == 1 else _next_model(runnable, state)
    return DecodeTurn(model=state.model, next_model=following), state


def let_in(
    batches: Iterable[BatchFacts], state: RoundState, model: str, now_s: float, settings: DecodeSettings
) -> RoundState:
    """The round after `model` was prefilled during a turn: it decodes first, because it is the running model, and the
    rest of that turn follows. Unchanged if it cannot run, or had its turn in this round.
    """
    runnable = {batch.model: batch for batch in batches if batch.can_run}
    before, present = state.quotas[: state.position], state.quotas[state.position : state.position + 1]
    if not present or model not in runnable or model in {quota.model for quota in (*before, *present)}:
        return state
    later = {quota.model: quota for quota in state.quotas[state.position + 1 :]}
    own, alpha = later.pop(model, None), state.alpha
    if own is None:
        (own,), alpha = _join(runnable, [model], state, settings)
    early_s = present[0].early_s
    left = replace(present[0], quota_s=state.ends_s - now_s + early_s)
    if left.quota_s >= (_WHOLE * 2 * early_s if early_s else settings.quota_min_s):
        later = {left.model: left, **later}
    else:
        before = (*before, *present)
    return _turn_at(len(before), (*before, own, *later.values()), alpha, now_s, settings)


def _join(
    runnable: Mapping[str, BatchFacts], joining: Sequence[str], state: RoundState, settings: DecodeSettings
) -> tuple[tuple[Quota, ...], float]:
    """Quotas for models that join a round, and its alpha with them, by a plan for all batches that can run now."""
    plan = plan_round(tuple(runnable.values()), settings)
    return tuple([quota for quota in plan.quotas if quota.model in joining]), max(state.alpha, plan.alpha)


def _advance(
    runnable: Mapping[str, BatchFacts], state: RoundState, now_s: float, settings: DecodeSettings
) -> RoundState:
    """The next turn of the round, or the first of a new one in the same order."""
    had = state.quotas[: state.position + 1]
    rest = tuple([quota for quota in state.quotas[state.position + 1 :] if quota.model in runnable])
    planned = {quota.model for quota in state.quotas}
    joining = [model for model in runnable if model not in planned]
    if not joining and not rest:
        plan = plan_round([runnable[quota.model] for quota in had if quota.model in runnable], settings)
        return _turn_at(0, plan.quotas, plan.alpha, now_s, settings)
    alpha = state.alpha
    if joining:
        joined, alpha = _join(runnable, joining, state, settings)
        rest = (*joined, *rest)
    return _turn_at(len(had), (*had, *rest), alpha, now_s, settings)


def _turn_at(
    position: int, quotas: tuple[Quota, ...], alpha: float, now_s: float, settings: DecodeSettings
) -> RoundState:
    return RoundState(
        quotas=quotas,
        position=position,
        ends_s=now_s + quotas[position].quota_s - quotas[position].early_s,
        patience_s=settings.quota_max_s,
        alpha=alpha,
    )


def _next_model(runnable: Mapping[str, BatchFacts], state: RoundState) -> str:
    """The model of the next turn: one that joins, else the next of this round, else of the next round."""
    in_round = [quota.model for quota in state.quotas]
    joining = [model for model in runnable if model not in in_round]
    after = (*joining, *in_round[state.position + 1 :], *in_round[: state.position])
    present = in_round[state.position]
    return next(model for model in after if model in runnable and model != present)
