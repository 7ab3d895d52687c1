"""How much is prefilled beside a batch, and that nothing starves where both are done in one step."""

from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.costs import CostEstimate, LatencyModel
from dataplane.scheduling.decode import BatchFacts, DecodeSettings, plan_round
from dataplane.scheduling.mixed_batches import (
    PIECE_TOKENS_MIN,
    MixedStepFacts,
    Prompt,
    choose_prefill_tokens,
    group_beside,
    keeps_up,
    step_budget_s,
)
from dataplane.scheduling.prefill import PrefillQueue, PrefillRequest, PrefillSettings
from dataplane.scheduling.schedule import SlotFacts, SlotState, Turn, TurnSettings, choose_turn
from tests.dataplane.scheduling.slots import prefills

LATENCY = LatencyModel(
    prefill_base_s=7e-3,
    prefill_per_token_s=4e-5,
    prefill_per_token2_s=1e-9,
    decode_base_s=12e-3,
    decode_per_context_token_s=1e-7,
    decode_per_sequence_s=1e-4,
)
TBT_S = 0.1
MIXED = TurnSettings(mixed_batches=True, step_by_step=False)
BY_STEP = TurnSettings(mixed_batches=True)


def step(prompts: list[tuple[int, int]], budget_s: float, tokens_max: int = 2048, **changes: float) -> MixedStepFacts:
    return MixedStepFacts(
        prompts=tuple(Prompt(cached, pending) for cached, pending in prompts),
        budget_s=budget_s,
        estimate=CostEstimate(latency=LATENCY, **changes),
        context_tokens=10_000,
        batch=10,
        tokens_max=tokens_max,
    )


def step_s(facts: MixedStepFacts, tokens: int) -> float:
    """How long the step takes that prefills so many tokens of the prompts, in order."""
    left, squared = tokens, 0
    for prompt in facts.prompts:
        count = min(left, prompt.pending)
        squared += (prompt.cached + count) ** 2 - prompt.cached**2
        left -= count
    return facts.estimate.mixed_s(tokens, squared, facts.context_tokens, facts.batch)


PROMPTS = st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 9000)), min_size=1, max_size=6)
FACTORS = st.floats(0.1, 10.0)


@given(PROMPTS, st.floats(-1.0, 1.0), st.integers(1, 8192), FACTORS, FACTORS, FACTORS)
def test_a_step_takes_as_many_tokens_as_its_budget_allows(
    prompts: list[tuple[int, int]], budget_s: float, tokens_max: int, prefill: float, decode: float, mixed: float
) -> None:
    factors = {"prefill_factor": prefill, "decode_factor": decode, "mixed_factor": mixed}
    facts = step(prompts, budget_s, tokens_max, **factors)
    tokens = choose_prefill_tokens(facts)
    most = min(tokens_max, sum(pending for _, pending in prompts))
    assert min(PIECE_TOKENS_MIN, most) <= tokens <= most
    if tokens > min(PIECE_TOKENS_MIN, most):
        assert step_s(facts, tokens) <= budget_s * (1 + 1e-9)
    if tokens < most - 1:
        assert step_s(facts, tokens + 2) > budget_s, "one token less is a matter of rounding"


@given(PROMPTS, st.floats(0.0, 0.5), st.integers(1, 2048), st.integers(2, 20))
def test_models_share_what_one_step_may_prefill(
    prompts: list[tuple[int, int]], budget_s: float, tokens_max: int, sharers: int
) -> None:
    alone = step(prompts, budget_s, tokens_max)
    tokens = choose_prefill_tokens(replace(alone, sharers=sharers))
    assert tokens <= max(tokens_max // sharers, min(PIECE_TOKENS_MIN, tokens_max))
    assert tokens == choose_prefill_tokens(replace(alone, tokens_max=max(tokens, 1))), "else as many as without others"


@given(PROMPTS, st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_a_longer_step_never_takes_fewer_tokens(prompts: list[tuple[int, int]], one_s: float, other_s: float) -> None:
    shorter_s, longer_s = sorted((one_s, other_s))
    assert choose_prefill_tokens(step(prompts, shorter_s)) <= choose_prefill_tokens(step(prompts, longer_s))


def test_tokens_that_cost_nothing_all_fit() -> None:
    free = LatencyModel(**dict.fromkeys(LatencyModel.__dataclass_fields__, 0.0))
    facts = MixedStepFacts(
        prompts=(Prompt(0, 500),),
        budget_s=0.0,
        estimate=CostEstimate(latency=free),
        context_tokens=0,
        batch=1,
        tokens_max=400,
    )
    assert choose_prefill_tokens(facts) == 400


def batch(model: str, step_s: float = 0.02, *, switch_s: float = 0.0, sequences: int = 1) -> BatchFacts:
    return BatchFacts(model=model, sequences=sequences, step_s=step_s, tbt_s=TBT_S, switch_s=switch_s)


def test_a_batch_alone_may_use_its_time_between_tokens() -> None:
    assert step_budget_s([batch("a")], "a", alpha=0.9) == pytest.approx(TBT_S)
    assert step_budget_s([batch("a", 0.12)], "a", alpha=0.9) == pytest.approx(TBT_S)


def test_with_others_a_step_may_be_so_long_that_its_tokens_last_for_the_round() -> None:
    """Steps of 20 and 30 ms need half of the time, so that each may take twice as long."""
    both = [batch("a"), batch("b", 0.03), batch("c", 0.5, sequences=0)]
    assert step_budget_s(both, "a", alpha=0.9) == pytest.approx(0.04), "nothing of c can run"
    assert step_budget_s(both, "b", alpha=0.9) == pytest.approx(0.06)
    assert step_budget_s([batch("a"), batch("b", 0.09)], "a", alpha=0.5) < 0.02


def test_switches_between_batches_leave_less() -> None:
    both = [batch("a", switch_s=0.5), batch("b", switch_s=0.5)]
    assert step_budget_s(both, "a", alpha=0.8) == pytest.approx(0.025)
    assert step_budget_s(both, "a", alpha=1.2) < 0.02


@given(
    st.lists(st.tuples(st.floats(1e-3, 0.2), st.floats(0.01, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=6),
    st.floats(0.5, 3.0),
)
def test_tokens_made_in_steps_of_the_budget_last_for_the_round(
    shapes: list[tuple[float, float, float]], quota_max_s: float
) -> None:
    """In the turns of a planned round whose load is below 1."""
    batches = [
        BatchFacts(model=str(number), sequences=1, step_s=step_s, tbt_s=tbt_s, switch_s=switch_s)
        for number, (step_s, tbt_s, switch_s) in enumerate(shapes)
    ]
    plan = plan_round(batches, DecodeSettings(quota_max_s=quota_max_s))
    assume(plan.alpha < 1)
    round_s = sum(quota.quota_s for quota in plan.quotas)
    round_s += sum(each.switch_s for each in batches) if len(batches) > 1 else 0.0
    for each, quota in zip(batches, plan.quotas, strict=True):
        budget_s = step_budget_s(batches, each.model, alpha=plan.alpha)
        lasting_s = each.tbt_s * quota.quota_s / budget_s
        assert lasting_s >= round_s * (1 - 1e-9)


def test_prompts_keep_up_if_they_get_their_share() -> None:
    assert keeps_up(0.1, 0.05, 0.5)
    assert not keeps_up(0.09, 0.05, 0.5)
    assert keeps_up(0.07, 0.05, 0.25)


def test_batch_requests_wait_while_interactive_ones_do_of_whatever_model() -> None:
    order = PrefillSettings()
    waiting = prefills(("a", 0.0, "NIW"), ("b", 0.0, "IW-N"))
    assert group_beside(waiting.groups, "a", 0.0, order) is None
    both = prefills(("a", 0.0, "NIW"), ("a", 5.0, "IW-N"), ("a", 4.0, "IW-F"))
    group = group_beside(both.groups, "a", 5.0, order)
    assert group is not None
    assert [request.tier for request in group.waiting] == ["IW-N", "IW-F"]


def facts_of(
    queue: PrefillQueue, batches: list[BatchFacts], running: str = "a", *, blocked: frozenset[str] = frozenset()
) -> SlotFacts:
    """A slot with room for all models."""
    models = {group.model for group in queue.groups}
    return SlotFacts(
        prefills=queue,
        prefill_s=dict.fromkeys(models, 0.05),
        batches=tuple(batches),
        running_model=running,
        blocked=blocked,
    )


def turn_of(facts: SlotFacts, now_s: float = 0.0, state: SlotState | None = None) -> Turn:
    turn, _ = choose_turn(facts, state or SlotState(), now_s, MIXED)
    assert turn is not None
    return turn


def test_prompts_of_the_model_that_decodes_go_beside_its_batch() -> None:
    turn = turn_of(facts_of(prefills(("a", 0.0, "IW-N")), [batch("a")]))
    assert (turn.kind, turn.group, turn.budget_s, turn.is_mixed) == ("decode", ("a0",), pytest.approx(TBT_S), True)
    plain, _ = choose_turn(facts_of(prefills(("a", 0.0, "IW-N")), [batch("a")]), SlotState(), 0.0, TurnSettings())
    assert plain is not None
    assert (plain.kind, plain.is_mixed) == ("prefill", False)


def test_a_slot_that_switches_and_cannot_keep_up_mixes_nothing() -> None:
    waiting, both = prefills(("a", 0.0, "IW-N")), [batch("a", switch_s=0.1), batch("b", switch_s=0.1)]
    assert turn_of(replace(facts_of(waiting, both), load=0.9)).is_mixed
    assert turn_of(replace(facts_of(waiting, both), load=1.1)).kind == "prefill"
    assert turn_of(replace(facts_of(waiting, [batch("a"), batch("b")]), load=1.1)).is_mixed, "nothing is switched"


def test_a_model_whose_turn_is_soon_waits_for_it_and_one_without_a_batch_does_not() -> None:
    both = [batch("a"), batch("b")]
    _, state = choose_turn(facts_of(PrefillQueue(), both), SlotState(), 0.0, MIXED)
    turn = turn_of(facts_of(prefills(("b", 0.0, "IW-N")), both), 0.01, state)
    assert (turn.kind, turn.model, turn.is_mixed) == ("decode", "a", False)
    turn = turn_of(facts_of(prefills(("c", 0.0, "IW-N")), both), 0.01, state)
    assert (turn.kind, turn.model) == ("prefill", "c")


def test_models_with_prompts_beside_share_a_step_s_tokens_where_turns_are_of_steps() -> None:
    waiting, both = prefills(("a", 0.0, "IW-N"), ("b", 0.0, "IW-N"), ("c", 0.0, "IW-N")), [batch("a"), batch("b")]
    turn, _ = choose_turn(facts_of(waiting, both), SlotState(), 0.0, BY_STEP)
    assert turn is not None
    assert (turn.is_mixed, turn.sharers) == (True, 2), "c has no batch beside which its prompt could go"
    assert turn_of(facts_of(waiting, both)).sharers == 1, "turns of several steps"
    later = prefills(("a", 0.0, "IW-N"), ("b", 0.0, "NIW"))
    alone, _ = choose_turn(facts_of(later, both), SlotState(), 0.0, BY_STEP)
    assert alone is not None
    assert alone.sharers == 1, "batch requests wait while interactive ones do"
    switching, _ = choose_turn(
        facts_of(waiting, [batch("a", switch_s=0.01), batch("b", switch_s=0.01)]), SlotState(), 0.0, BY_STEP
    )
    assert switching is not None
    assert (switching.is_mixed, switching.sharers) == (True, 1)


def test_where_no_time_is_spare_the_two_kinds_take_turns() -> None:
    turn = turn_of(facts_of(prefills(("a", 0.0, "IW-N")), [batch("a", 0.11)]))
    assert (turn.kind, turn.group) == ("prefill", ("a0",))


@pytest.mark.parametrize(("step_s", "kind"), [(0.04, "decode"), (0.06, "prefill")])
def test_nearly_due_prompts_that_decodes_starve_get_their_turn(step_s: float, kind: str) -> None:
    """Beside steps of 60 of 100 ms they get less than half of the time."""
    waiting = prefills(("a", 0.0, "IW-F"))
    assert turn_of(facts_of(waiting, [batch("a", step_s)]), 0.5).is_mixed
    assert turn_of(facts_of(waiting, [batch("a", step_s)]), 0.9).kind == kind


def test_nearly_due_prompts_that_find_no_memory_get_their_turn() -> None:
    waiting = prefills(("a", 0.0, "IW-F"))
    blocked = facts_of(waiting, [batch("a")], blocked=frozenset({"a"}))
    assert turn_of(blocked, 0.5).is_mixed
    assert turn_of(blocked, 0.9).kind == "prefill"


def test_prompts_are_not_kept_waiting_beside_a_batch_that_has_no_memory_for_itself() -> None:
    """Perhaps only a prefill frees what the batch needs."""
    facts = facts_of(prefills(("a", 0.0, "IW-N")), [batch("a")])
    assert turn_of(facts).is_mixed
    assert turn_of(replace(facts, stuck=frozenset({"a"}))).kind == "prefill"


def test_nearly_due_prompts_of_another_model_are_not_kept_waiting_by_those_beside() -> None:
    waiting = prefills(("a", 0.0, "IW-N"), ("c", 0.0, "IW-F"))
    assert turn_of(facts_of(waiting, [batch("a")]), 0.9).kind == "prefill"


def test_time_of_mixed_steps_counts_for_no_share_but_uses_up_the_turn() -> None:
    both = [batch("a"), batch("b")]
    waiting = facts_of(prefills(("a", 0.0, "IW-N")), both)
    _, state = choose_turn(waiting, SlotState(), 0.0, MIXED)
    after = state.spent("decode", 5.0)
    assert after.round.ends_s == state.round.ends_s
    _, settled = choose_turn(waiting, after, 0.01, MIXED)
    assert (settled.over_s, settled.owed) == (0.0, None)


@dataclass(kw_only=True)
class Slot:
    """A slot that holds all models, run step by step by a true latency model. Every request makes `tokens` tokens."""

    tokens: int
    turns: TurnSettings
    prefill_tokens_max: int = 512
    now_s: float = 0.0
    state: SlotState = field(default_factory=SlotState)
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    cached: dict[str, int] = field(default_factory=dict)
    length: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)  # of those that decode
    first_s: dict[str, float] = field(default_factory=dict)
    mixed_steps: int = 0

    def arrive(self, name: str, model: str, tokens: int, tier: Tier) -> None:
        request = PrefillRequest(
            request_id=name, model=model, tokens=tokens, tier=tier, arrived_s=self.now_s, ttft_s=10.0
        )
        self.queue = self.queue.join(request, self.turns.prefill)
        self.cached[name], self.length[name] = 0, tokens

    def _batch(self, model: str) -> list[str]:
        return [name for name in self.left if name[0] == model]

    def _step_s(self, model: str) -> float:
        names = self._batch(model)
        return LATENCY.decode_s(sum(self.length[name] for name in names), len(names))

    def step(self) -> None:
        models = sorted({name[0] for name in self.left})
        batches = [batch(model, self._step_s(model), sequences=len(self._batch(model))) for model in models]
        facts = facts_of(self.queue, batches, self.state.turn.model if self.state.turn else "a")
        turn, self.state = choose_turn(facts, self.state, self.now_s, self.turns)
        if turn is None:
            self.now_s += 0.01
            return
        took_s = self._run(turn)
        self.state = self.state.spent(turn.kind, took_s)
        self.now_s += took_s
        for name in [name for name, cached in self.cached.items() if cached == self.length[name]]:
            del self.cached[name]
            self.queue = self.queue.remove(name)
            self.first_s[name], self.left[name] = self.now_s, self.tokens

    def _run(self, turn: Turn) -> float:
        decoding = self._batch(turn.model) if turn.kind == "decode" else []
        facts = MixedStepFacts(
            prompts=tuple(Prompt(self.cached[name], self.length[name] - self.cached[name]) for name in turn.group),
            budget_s=turn.budget_s,
            estimate=CostEstimate(latency=LATENCY),
            context_tokens=sum(self.length[name] for name in decoding),
            batch=len(decoding),
            tokens_max=self.prefill_tokens_max,
            sharers=turn.sharers,
        )
        most = choose_prefill_tokens(facts) if turn.is_mixed else self.prefill_tokens_max if turn.group else 0
        tokens = squared = 0
        for name in turn.group:
            count = min(most - tokens, self.length[name] - self.cached[name])
            squared += (self.cached[name] + count) ** 2 - self.cached[name] ** 2
            self.cached[name] += count
            tokens += count
        for name in decoding:
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
        if not decoding:
            return LATENCY.prefill_s(tokens, squared)
        if not tokens:
            return LATENCY.decode_s(facts.context_tokens, len(decoding))
        self.mixed_steps += 1
        took_s = LATENCY.mixed_s(tokens, squared, facts.context_tokens, len(decoding))
        assert took_s <= turn.budget_s * (1 + 1e-9) or tokens <= PIECE_TOKENS_MIN
        assert turn.budget_s <= TBT_S * (1 + 1e-9)
        return took_s


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.integers(1, 3000), st.sampled_from(["IW-F", "IW-N", "NIW"]), st.integers(0, 30)
    ),
    min_size=1,
    max_size=30,
)


@given(ARRIVALS, st.integers(1, 200), st.floats(0.1, 0.9), st.booleans())
@settings(max_examples=100)
def test_every_prompt_makes_progress_and_no_mixed_step_is_longer_than_the_objective(
    arrivals: list[tuple[str, int, Tier, int]], tokens: int, share: float, by_step: bool
) -> None:
    turns = TurnSettings(mixed_batches=True, step_by_step=by_step, prefill_share=share)
    node = Slot(tokens=tokens, turns=turns)
    for number, (model, prompt_tokens, tier, steps) in enumerate(arrivals):
        node.arrive(f"{model}{number}", model, prompt_tokens, tier)
        for _ in range(steps):
            node.step()
    for _ in range(200 + len(arrivals) * (3000 // PIECE_TOKENS_MIN + 3 * tokens)):
        node.step()
    assert len(node.first_s) == len(arrivals)
    assert not node.left


def test_a_model_with_a_prompt_in_each_round_leaves_the_others_their_steps() -> None:
    """Its prompts have prefill turns, since the load leaves no time beside its batch."""
    node = Slot(tokens=10**6, turns=BY_STEP)
    for model in "ab":
        node.arrive(f"{model}-first", model, 9000, "IW-N")
    while len(node.first_s) < 2:
        node.step()
    for name in ("a-first", "b-first"):
        node.length[name] = 400_000  # steps of 52 ms each: the objective of 100 ms leaves nothing
    made = {model: node.left[f"{model}-first"] for model in "ab"}
    node.tokens = 1
    for number in range(600):
        before = node.left["b-first"]
        node.step()
        if node.left["b-first"] < before:
            node.arrive(f"b{number}", "b", 100, "IW-F")
    steps = {model: made[model] - node.left[f"{model}-first"] for model in "ab"}
    assert steps["a"] > steps["b"] / 2 > 10, steps


@pytest.mark.parametrize("turns", [MIXED, BY_STEP], ids=["turns", "steps"])
def test_a_stream_of_prompts_beside_a_batch_starves_neither_its_prompts_nor_another_models(turns: TurnSettings) -> None:
    node = Slot(tokens=10**6, turns=turns)
    node.arrive("a-first", "a", 100, "IW-N")
    while "a-first" not in node.first_s:
        node.step()
    node.tokens = 5
    for number in range(200):
        node.arrive(f"a{number}", "a", 800, "IW-N")
        if number == 50:
            node.arrive("b", "b", 500, "IW-N")
        for _ in range(3):
            node.step()
    assert "b" in node.first_s
    assert len(node.first_s) > 190
    assert node.mixed_steps > 300
