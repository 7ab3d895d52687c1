"""What a slot runs next: which requests it prefills, or which model's batch it decodes. Pure.

One policy serves slots that prefill, slots that decode and slots that do both; on the first two, only one kind waits
as a rule. If both do:

1. Prefill is first while it costs no switch, its group has been begun, a first token is nearly due, the batch has no
   memory, or every batch is far enough ahead of its deadlines to wait for it; otherwise decode continues.
2. A kind that has exceeded its share of the time by `burst_s` is second until the other has caught up.
3. A kind that waits alone runs at once; a kind that does not wait accumulates no share.
4. With `mixed_batches`, a decode turn also prefills prompts of its model beside the batch, as far as the objectives
   leave time for it (`mixed_batches.py`). Such prompts do not go before decode by rules 1 and 2, nor do
   those of a model whose decode turn comes within `near_s`; unless they are nearly due and would get less than
   prefill's share or no memory, another model's prompts are nearly due, or the batch has no memory for itself, which
   only a prefill may free. Meanwhile no time counts for the shares.

With `time_slices = "deadlines"`, the model is chosen first, by the deadlines of its prompts and its batch together
(`deadlines.py`); rules 2 to 4 then hold between its own prompts and its own batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from dataclasses import replace as replace_decode
from functools import cached_property
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.scheduling.deadlines import ModelWork, SliceState, TimeSlices, choose_slice, prompts_aside
from dataplane.scheduling.decode import (
    BatchFacts,
    DecodeSettings,
    DecodeTurn,
    Quota,
    RoundState,
    choose_decode_turn,
    idle_s,
    let_in,
)
from dataplane.scheduling.mixed_batches import group_beside, keeps_up, step_budget_s
from dataplane.scheduling.prefill import (
    GroupChoice,
    GroupState,
    PrefillGroup,
    PrefillQueue,
    PrefillSettings,
    choose_group,
)

Kind = Literal["prefill", "decode"]


class SlotFacts(Struct, frozen=True, kw_only=True):
    """All work of a slot. `prefill_s`: estimate for the next request of a model's front group; `switch_s`: time to
    switch to the model, 0 if resident (absent: 0); `load_s`: to load all of its weights, for slices by deadlines;
    `unready`: models whose weights are not in host memory yet; `blocked`: models whose prompts found no memory beside
    their batch; `stuck`: models whose batch found none for itself, and gave back what it had, or none was being freed;
    `load`: of the slot, measured.
    """

    prefills: PrefillQueue = field(default_factory=PrefillQueue)
    prefill_s: Mapping[str, float] = field(default_factory=dict)
    switch_s: Mapping[str, float] = field(default_factory=dict)
    load_s: Mapping[str, float] = field(default_factory=dict)
    batches: tuple[BatchFacts, ...] = ()
    running_model: str | None = None
    unready: frozenset[str] = frozenset()
    blocked: frozenset[str] = frozenset()
    stuck: frozenset[str] = frozenset()
    load: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TurnSettings:
    """`prefill_share`: of the time while both kinds wait. `near_s`: a first token that is due so soon after the prefill
    could end is nearly due. `burst_s`: by how much a kind may exceed its share. `mixed_batches`: whether a step may do
    both; with `step_by_step` prompts then need no turns, and rounds without switches are of single steps.
    `time_slices`: how models share the time.
    """

    prefill: PrefillSettings = dataclass_field(default_factory=PrefillSettings)
    decode: DecodeSettings = dataclass_field(default_factory=DecodeSettings)
    prefill_share: float = 0.5
    near_s: float = 0.25
    burst_s: float = 1.0
    mixed_batches: bool = False
    step_by_step: bool = True
    time_slices: TimeSlices = "rounds"

    def __post_init__(self) -> None:
        """Check the ranges: no kind may starve.

        Raises:
            ValueError: a setting is out of range; the message names it.
        """
        if not 0 < self.prefill_share < 1:
            raise ValueError(f"prefill_share must be between 0 and 1, not {self.prefill_share}")
        if not self.near_s >= 0:
            raise ValueError(f"near_s must be at least 0, not {self.near_s}")
        if not self.burst_s > 0:
            raise ValueError(f"burst_s must be over 0, not {self.burst_s}")

    @cached_property
    def rounds(self) -> DecodeSettings:
        """The settings of rounds."""
        return replace_decode(self.decode, step_by_step=self.mixed_batches and self.step_by_step)


class Turn(Struct, frozen=True, kw_only=True):
    """What to run. `group`: ids of a group's requests in order. A prefill runs as many as a step can; a decode turn
    with a group is mixed: its steps, of `budget_s` each, prefill beside the batch, and `sharers` models share what one
    step may prefill. `counts`: for its kind's share.

    `started_s` changes when the kind or the model does, by deadlines also when the next model does. `next_model`: the
    model to prefetch, None if none follows.
    """

    kind: Kind
    model: str
    group: tuple[str, ...] = ()
    budget_s: float = 0.0
    sharers: int = 1
    counts: bool = True
    started_s: float
    next_model: str | None

    @property
    def is_mixed(self) -> bool:
        return self.kind == "decode" and bool(self.group)


class SlotState(Struct, frozen=True, kw_only=True):
    """State between two decisions. `over_s`: seconds by which prefill exceeded its share, negative if decode did;
    `owed`: the kind that is to catch up; the times spent are those since the last decision.
    """

    round: RoundState = field(default_factory=RoundState)
    slice: SliceState = field(default_factory=SliceState)
    groups: GroupState = field(default_factory=GroupState)
    turn: Turn | None = None
    over_s: float = 0.0
    prefill_spent_s: float = 0.0
    decode_spent_s: float = 0.0
    owed: Kind | None = None

    def spent(self, kind: Kind, seconds: float, *, ran: bool = True) -> "SlotState":
        """The state after a step of `seconds`. `ran` False: it only waited, for KV or memory. Neither prefills nor
        (within limits) waits use up a decode turn, so that it makes at least one step; what is prefilled beside the
        batch does.
        """
        assert seconds >= 0
        if kind == "prefill":
            return replace(self, prefill_spent_s=self.prefill_spent_s + seconds, round=self.round.later(seconds))
        counted = self.turn is None or self.turn.counts
        decode_spent_s = self.decode_spent_s + (seconds if counted else 0.0)
        if ran:
            return replace(self, decode_spent_s=decode_spent_s)
        return replace(self, decode_spent_s=decode_spent_s, round=self.round.waited(seconds))

    def cut_short(self, now_s: float) -> "SlotState":
        """The state after a turn that cannot run, nor by any transfer: by deadlines other models are tried first,
        and in rounds the next decode turn begins.
        """
        assert self.turn is not None
        slice_ = self.slice if self.slice.model is None else self.slice.cut_short(self.turn.model)
        if self.turn.kind == "prefill":
            return replace(self, slice=slice_)
        return replace(self, round=replace(self.round, ends_s=min(self.round.ends_s, now_s)), slice=slice_)


_NOTHING = SlotState()


def choose_turn(
    facts: SlotFacts, state: SlotState, now_s: float, settings: TurnSettings
) -> tuple[Turn | None, SlotState]:
    """What to run in the next step, None if nothing can. Called before every step."""
    batches, groups, last = facts.batches, facts.prefills.groups, state.turn
    if not batches and not groups:
        return None, _NOTHING
    if settings.time_slices == "deadlines":
        return _choose_by_deadlines(facts, state, now_s, settings)
    decode, round_, prefill = None, _NOTHING.round, None
    if batches:
        round_ = state.round
        if last and last.kind == "prefill":
            round_ = let_in(batches, round_, last.model, now_s, settings.rounds)
        decode, round_ = choose_decode_turn(batches, round_, now_s, settings.rounds)
    if facts.unready:
        groups = tuple([group for group in groups if group.model not in facts.unready])
    if groups:
        prefill = choose_group(groups, facts.running_model, state.groups, now_s, settings.prefill)
    over_s, owed = settled_shares(state, settings, prefill=prefill is not None, decode=decode is not None)
    budgets_s: Mapping[str, float] = {}
    if settings.mixed_batches and prefill and decode:
        budgets_s = _budgets_s(batches, groups, max(round_.alpha, facts.load))
    mixes = prefill is not None and _is_mixed(facts, budgets_s, round_, prefill, now_s, settings)
    if prefill and not mixes and _prefill_first(facts, state, owed, prefill, decode, now_s, settings):
        turn, served = _prefill_turn(last, prefill, decode, now_s, settings), prefill.state
    elif decode:
        turn, served = _decode_turn(last, prefill, decode, now_s, counts=not mixes), state.groups
        if decode.model in budgets_s:
            own = prefill if prefill and prefill.group.model == decode.model else None
            group = own.group if own else group_beside(groups, decode.model, now_s, settings.prefill)
            turn = _mixed_turn(turn, group, budgets_s[decode.model], now_s, settings)
            turn = replace(turn, sharers=_sharers(groups, budgets_s, round_, now_s, settings))
            served = own.state if own else served
        if not _goes_on(last, "decode", decode.model):
            round_ = round_.later(facts.switch_s.get(decode.model, 0.0))
    else:
        return None, _NOTHING
    return turn, SlotState(round=round_, groups=served, turn=turn, over_s=over_s, owed=owed)


def _choose_by_deadlines(
    facts: SlotFacts, state: SlotState, now_s: float, settings: TurnSettings
) -> tuple[Turn | None, SlotState]:
    """The model by deadlines; then its prompts, unless its batch is owed time or a step may do both."""
    work = _work(facts, now_s)
    if not work:
        return None, _NOTHING
    able = [batch for batch in facts.batches if batch.can_run]
    alpha = sum([batch.step_s / batch.tbt_s for batch in able])
    exposed = any(batch.switch_s and not batch.prefetched for batch in able)
    choice, slice_ = choose_slice(
        work,
        state.slice,
        now_s,
        near_s=settings.near_s,
        settings=settings.decode,
        exposed_share=alpha if exposed else 0.0,
        held=facts.load_s,
    )
    tried = [one for one in work if one.model == choice.model or one.model not in slice_.stuck]
    aside = prompts_aside(tried, choice.model, now_s)
    model = aside or choice.model
    groups = [group for group in facts.prefills.groups if group.model == model and model not in facts.unready]
    batch = next((one for one in able if one.model == model and not aside), None)
    prefill = choose_group(groups, model, state.groups, now_s, settings.prefill)
    over_s, owed = settled_shares(state, settings, prefill=prefill is not None, decode=batch is not None)
    round_ = RoundState(
        quotas=tuple([Quota(model=each, quota_s=choice.slice_s) for each in (choice.model, *choice.following)]),
        ends_s=slice_.ends_s,
        alpha=alpha,
    )
    budgets_s: Mapping[str, float] = {}
    if settings.mixed_batches and prefill and batch:
        budgets_s = _budgets_s(facts.batches, groups, max(round_.alpha, facts.load))
    mixes = prefill is not None and _is_mixed(facts, budgets_s, round_, prefill, now_s, settings)
    kind: Kind = "prefill" if prefill and (batch is None or not (mixes or owed == "decode")) else "decode"
    next_model = choice.model if aside else next(iter(choice.following), None)
    turn = _slice_turn(state.turn, kind, model, next_model, now_s)
    if prefill and kind == "prefill":
        ids = tuple([request.request_id for request in prefill.group.in_order(now_s, settings.prefill)])
        turn = replace(turn, group=ids)
    elif prefill and model in budgets_s:
        turn = _mixed_turn(replace(turn, counts=not mixes), prefill.group, budgets_s[model], now_s, settings)
    served = prefill.state if prefill else state.groups
    return turn, SlotState(round=round_, slice=slice_, groups=served, turn=turn, over_s=over_s, owed=owed)


def _slice_turn(last: Turn | None, kind: Kind, model: str, next_model: str | None, now_s: float) -> Turn:
    """A turn of a slice by deadlines. Where another model comes to be the next, that one is prefetched too."""
    goes_on = last is not None and _goes_on(last, kind, model) and last.next_model == next_model
    started_s = last.started_s if last and goes_on else now_s
    return Turn(kind=kind, model=model, started_s=started_s, next_model=next_model)


def _work(facts: SlotFacts, now_s: float) -> list[ModelWork]:
    """Each model that can run, with the latest moment at which it must."""
    groups = [group for group in facts.prefills.groups if group.model not in facts.unready]
    batches = [batch for batch in facts.batches if batch.can_run]
    due_s = {batch.model: now_s + batch.slack_s - batch.step_s for batch in batches}
    for group in groups:
        model = group.model
        first_s = min([request.deadline_s for request in group.waiting]) - facts.prefill_s.get(model, 0.0)
        due_s[model] = min(first_s, due_s.get(model, math.inf))
    waiting = {group.model for group in groups}
    interactive = {group.model for group in groups if not group.waiting[0].in_background}
    interactive |= {batch.model for batch in batches if not batch.background}
    return [
        ModelWork(
            model=model,
            due_s=each_s,
            missing_s=facts.switch_s.get(model, 0.0),
            load_s=facts.load_s.get(model, 0.0),
            prompts=model in waiting,
            prefill_s=facts.prefill_s.get(model, 0.0),
            background=model not in interactive,
        )
        for model, each_s in due_s.items()
    ]


def hold_prefills(held: int, kind: Kind, *, ran: bool, made_tokens: bool, freeing: bool, batches: int) -> int:
    """For how many more decode turns prefills are held back after a step; `held`: before it.

    A prefill that found no memory for its KV waits for a decode turn, unless a transfer is `freeing` memory: a decode
    in between would swap that KV back in. If that decode finds no memory either, each of the other `batches` gets its
    turn first, because perhaps only one of them can run and free the memory that all wait for.
    """
    if kind == "prefill":
        return 0 if ran or freeing else max(1, batches)
    if not ran:
        return max(0, held - 1)
    return 0 if made_tokens else held  # the step may only have loaded weights


def settled_shares(
    state: SlotState, settings: TurnSettings, *, prefill: bool, decode: bool
) -> tuple[float, Kind | None]:
    """`settle_shares` of a slot's state."""
    return settle_shares(
        state.over_s,
        state.owed,
        prefill_spent_s=state.prefill_spent_s,
        decode_spent_s=state.decode_spent_s,
        prefill=prefill,
        decode=decode,
        settings=settings,
    )


def settle_shares(
    over_s: float,
    owed: Kind | None,
    *,
    prefill_spent_s: float,
    decode_spent_s: float,
    prefill: bool,
    decode: bool,
    settings: TurnSettings,
) -> tuple[float, Kind | None]:
    """The shares after the time spent since the last update, and the kind that is owed time (rules 2 and 3). `prefill`,
    `decode`: which kinds wait. If no model needs a switch, this alone decides which kind is first: decode, if it is
    owed time.
    """
    share = settings.prefill_share
    over_s = over_s + (1 - share) * prefill_spent_s - share * decode_spent_s
    if (over_s < 0 and not prefill) or (over_s > 0 and not decode):
        over_s = 0.0
    if (owed == "decode" and over_s <= 0) or (owed == "prefill" and over_s >= 0):
        owed = None
    if over_s >= settings.burst_s:
        owed = "decode"
    elif over_s <= -settings.burst_s:
        owed = "prefill"
    return over_s, owed


def _budgets_s(batches: Sequence[BatchFacts], groups: Sequence[PrefillGroup], alpha: float) -> Mapping[str, float]:
    """By model with prompts and a batch that can run, how long its steps may take, if there is time for the prompts."""
    waiting = {group.model for group in groups}
    able = [batch for batch in batches if batch.can_run and batch.model in waiting]
    budgets = [(batch, step_budget_s(batches, batch.model, alpha=alpha)) for batch in able]
    return {batch.model: budget_s for batch, budget_s in budgets if budget_s > batch.step_s}


def _is_mixed(
    facts: SlotFacts,
    budgets_s: Mapping[str, float],
    round_: RoundState,
    choice: GroupChoice,
    now_s: float,
    settings: TurnSettings,
) -> bool:
    """Rule 4: whether the prompts that would be prefilled first are prefilled beside their model's batch instead."""
    model = choice.group.model
    if model not in budgets_s or model in facts.stuck:
        return False
    wait_s = idle_s(round_, model, now_s)
    if wait_s > settings.near_s:
        return False
    if _is_near(facts, choice, now_s, settings, others=True):
        return False
    step_s = next(batch.step_s for batch in facts.batches if batch.model == model)
    if wait_s == 0 and model not in facts.blocked and keeps_up(budgets_s[model], step_s, settings.prefill_share):
        return True
    return not _is_near(facts, choice, now_s + wait_s, settings)


def _is_near(
    facts: SlotFacts, choice: GroupChoice, now_s: float, settings: TurnSettings, *, others: bool = False
) -> bool:
    """Whether a first token is nearly due, of any model or of the `others` only."""
    model = choice.group.model
    takes_s = facts.switch_s.get(model, 0.0) + facts.prefill_s.get(model, 0.0)
    groups = [group for group in (choice.group, *choice.following) if not (others and group.model == model)]
    due_s = min([request.deadline_s for group in groups for request in group.waiting], default=math.inf)
    return due_s - takes_s - settings.near_s <= now_s


def _prefill_first(
    facts: SlotFacts,
    state: SlotState,
    owed: Kind | None,
    choice: GroupChoice,
    decode: DecodeTurn | None,
    now_s: float,
    settings: TurnSettings,
) -> bool:
    """Rules 1 to 3."""
    if decode is None:
        return True
    if owed:
        return owed == "prefill"
    model, last = choice.group.model, state.turn
    switch_s = facts.switch_s.get(model, 0.0)
    begun = last is not None and last.kind == "prefill" and state.groups.serving == choice.group.group_id
    if begun or switch_s == 0 or decode.model in facts.stuck:
        return True
    if _is_near(facts, choice, now_s, settings):
        return True
    takes_s = switch_s + facts.prefill_s.get(model, 0.0)
    back_s = {batch.model: 0.0 if batch.model == model else batch.switch_s for batch in facts.batches}
    return all(batch.slack_s >= takes_s + back_s[batch.model] for batch in facts.batches if batch.can_run)


def _prefill_turn(
    last: Turn | None,
    choice: GroupChoice,
    decode: DecodeTurn | None,
    now_s: float,
    settings: TurnSettings,
) -> Turn:
    model = choice.group.model
    after = [group.model for group in choice.following]
    if decode:
        after.append(decode.model)
    return Turn(
        kind="prefill",
        model=model,
        group=tuple([request.request_id for request in choice.group.in_order(now_s, settings.prefill)]),
        started_s=last.started_s if last and _goes_on(last, "prefill", model) else now_s,
        next_model=next((other for other in after if other != model), None) if after else None,
    )


def _decode_turn(
    last: Turn | None, prefill: GroupChoice | None, decode: DecodeTurn, now_s: float, *, counts: bool
) -> Turn:
    waiting = prefill.group.model if prefill and prefill.group.model != decode.model else None
    return Turn(
        kind="decode",
        model=decode.model,
        started_s=last.started_s if last and _goes_on(last, "decode", decode.model) else now_s,
        next_model=waiting or decode.next_model,
        counts=counts,
    )


def _sharers(
    groups: Sequence[PrefillGroup],
    budgets_s: Mapping[str, float],
    round_: RoundState,
    now_s: float,
    settings: TurnSettings,
) -> int:
    """How many models have prompts beside their batches in a round of single steps; 1 in others."""
    if not round_.is_by_step:
        return 1
    beside = [group_beside(groups, model, now_s, settings.prefill) for model in budgets_s]
    return max(1, sum([group is not None for group in beside]))


def _mixed_turn(turn: Turn, group: PrefillGroup | None, budget_s: float, now_s: float, settings: TurnSettings) -> Turn:
    """A decode turn with a group that is prefilled beside the batch; the same turn without a group."""
    if group is None:
        return turn
    ids = tuple([request.request_id for request in group.in_order(now_s, settings.prefill)])
    return replace(turn, group=ids, budget_s=budget_s)


def _goes_on(last: Turn | None, kind: Kind, model: str) -> bool:
    return last is not None and last.kind == kind and last.model == model
