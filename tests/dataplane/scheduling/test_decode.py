"""Decode turns: equations 2 and 3 by hand, what they promise when a round is run step by step, and the edges."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dataplane.scheduling.decode import (
    BatchFacts,
    DecodeSettings,
    Quota,
    RoundState,
    Switch,
    choose_decode_turn,
    exposed_s,
    least_lasting_s,
    let_in,
    plan_round,
)

SETTINGS = DecodeSettings(quota_max_s=3.0)


def batch(
    model: str, step_s: float = 0.025, tbt_s: float = 0.1, switch_s: float = 1.0, sequences: int = 1
) -> BatchFacts:
    return BatchFacts(model=model, sequences=sequences, step_s=step_s, tbt_s=tbt_s, switch_s=switch_s)


def batches(models: str) -> list[BatchFacts]:
    return [batch(model) for model in models]


def test_the_papers_example() -> None:
    """c = 3, n = 4: alpha = 3 / (4 x 3) + 3/4 = 1, q = 3 / (4 x 1/4) = 3 s; 12 s a round, 120 tokens each."""
    plan = plan_round(batches("abc"), SETTINGS)
    assert plan.alpha == pytest.approx(1.0)
    assert [quota.quota_s for quota in plan.quotas] == pytest.approx([3.0] * 3)
    assert sum(quota.quota_s for quota in plan.quotas) + 3.0 == pytest.approx(12.0)
    assert plan.quotas[0].quota_s / 0.025 == pytest.approx(120)


@pytest.mark.parametrize(
    ("facts", "alpha", "quotas_s"),
    [
        # little to do: alpha stays at 0.5; B = 0.2 / (0.5 - 0.2) = 2/3 s, q = B / 10
        ([batch("a", 0.01, 0.1, 0.1), batch("b", 0.01, 0.1, 0.1)], 0.5, [0.2 / 3, 0.2 / 3]),
        # too much: n = 2, alpha = 2 / (2 x 3) + 2 = 2.333 for four; q = Q_MAX
        ([batch(m, 0.05, 0.1, 0.5) for m in "abcd"], 2 + 1 / 3, [3.0] * 4),
        # different n, 10 and 2: sum 0.6; alpha = 0.6 / (2 x 3) + 0.6 = 0.7; B = 0.6 / 0.1 = 6
        ([batch("a", 0.01, 0.1, 0.3), batch("b", 0.05, 0.1, 0.3)], 0.7, [0.6, 3.0]),
        # all resident: the smallest quota is quota_min_s, the others in proportion; alpha is what is busy
        ([batch("a", 0.01, 0.1, 0.0), batch("b", 0.05, 0.1, 0.0)], 0.6, [0.05, 0.25]),
        # alone and resident
        ([batch("a", 0.01, 0.1, 0.0)], 0.5, [0.05]),
        # steps longer than the largest quota: one each; a round of 8 s makes a token that lasts 1 s
        ([batch("a", 4.0, 1.0, 0.0), batch("b", 4.0, 1.0, 0.0)], 8.0, [4.0, 4.0]),
        # one step of b is longer than its quota of 0.75 s: a round of 4 s, and a's tokens last 0.75 s
        ([batch("a", 0.4, 0.1, 0.0), batch("b", 1.0, 1.0, 0.0)], 5 + 1 / 3, [3.0, 1.0]),
        # a batch with a lax target (n = 1000) does not make the other's quota endless
        ([batch("a", 0.001, 1.0, 0.0), batch("b", 0.1, 0.1, 0.0)], 1.001, [0.003, 3.0]),
    ],
)
def test_plans_by_hand(facts: list[BatchFacts], alpha: float, quotas_s: list[float]) -> None:
    plan = plan_round(facts, SETTINGS)
    assert plan.alpha == pytest.approx(alpha)
    assert [quota.quota_s for quota in plan.quotas] == pytest.approx(quotas_s)


BY_STEP = DecodeSettings(step_by_step=True)


def test_step_by_step_a_round_without_switches_is_one_step_of_each_and_others_are_as_they_were() -> None:
    resident = [batch("a", 0.01, 0.1, 0.0), batch("b", 0.05, 0.1, 0.0)]
    assert [quota.quota_s for quota in plan_round(resident, BY_STEP).quotas] == pytest.approx([0.01, 0.05])
    lax = [batch("a", 0.01, 0.1, 0.0), batch("b", 0.05, 0.5, 0.0)]
    assert [quota.quota_s for quota in plan_round(lax, BY_STEP).quotas] == pytest.approx([0.05, 0.05]), "5 steps, 1"
    switching = [replace(resident[0], switch_s=0.2), resident[1]]
    assert plan_round(switching, BY_STEP) == plan_round(switching, DecodeSettings())


def test_step_by_step_a_step_that_took_less_than_planned_is_not_followed_by_another_one() -> None:
    resident = [batch("a", 0.02, 0.1, 0.0), batch("b", 0.02, 0.1, 0.0)]

    def turns(settings_: DecodeSettings) -> list[str]:
        now_s, state, models = 0.0, RoundState(), []
        for _ in range(6):
            turn, state = choose_decode_turn(resident, state, now_s, settings_)
            assert turn is not None
            models.append(turn.model)
            now_s += 0.0199
        return models

    assert turns(BY_STEP) == ["a", "b"] * 3
    assert turns(DecodeSettings(quota_min_s=0.02)) == ["a", "a", "b", "b", "a", "a"], "for the last 0.1 ms of a quota"


def test_step_by_step_a_turn_that_a_prefill_interrupts_is_not_lost() -> None:
    """Models that get a prompt in each round would otherwise run for ever, and others never."""
    resident = [batch(model, 0.02, 0.1, 0.0) for model in "ab"]
    _, state = choose_decode_turn(resident, RoundState(), 0.0, BY_STEP)
    assert (state.model, state.ends_s) == ("a", pytest.approx(0.01))
    state = let_in(resident, state.later(0.03), "b", 0.03, BY_STEP)
    assert [quota.model for quota in state.quotas[state.position :]] == ["b", "a"]
    assert state.quotas[-1].quota_s == pytest.approx(0.02), "all of it"
    turn, state = choose_decode_turn(resident, state, 0.05, BY_STEP)
    assert turn is not None
    assert turn.model == "a"
    after = let_in(resident, replace(state, ends_s=0.055), "c", 0.06, BY_STEP)
    assert after.model == "a", "c has nothing to run"


rounds = st.lists(
    st.tuples(
        st.floats(0.002, 0.5),  # step
        st.floats(0.02, 1.0),  # target
        st.floats(0.0, 3.0),  # switch
        st.booleans(),  # prefetched
    ),
    min_size=1,
    max_size=8,
).map(lambda rows: [replace(batch(f"m{i}", *row[:3]), prefetched=row[3]) for i, row in enumerate(rows)])


@given(rounds)
def test_plans_hold_their_bounds(facts: list[BatchFacts]) -> None:
    settings_ = DecodeSettings()
    plan = plan_round(facts, settings_)
    assert plan.alpha >= settings_.alpha_min
    for quota, one in zip(plan.quotas, facts, strict=True):
        assert quota.model == one.model
        assert one.step_s <= quota.quota_s <= max(one.step_s, settings_.quota_max_s) * (1 + 1e-9)
    round_s = sum(quota.quota_s for quota in plan.quotas) + sum(one.switch_s for one in facts)
    longest_s = settings_.quota_max_s + max(one.step_s for one in facts) + 3.0
    assert round_s <= len(facts) * longest_s * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from([0.0, 0.1, 0.5, 2.0])), min_size=1, max_size=6),
    st.floats(-1.0, 1.0),
)
def test_the_least_lasting_time_pays_for_what_is_exposed(rows: list[tuple[float, float]], spare: float) -> None:
    switches = [Switch(time_s=time_s, hidden_share=share) for time_s, share in rows]
    lasting_s = least_lasting_s(switches, spare)
    if math.isfinite(lasting_s):
        assert exposed_s(switches, lasting_s) <= spare * lasting_s + 1e-6
    for part in (0.0, 0.3, 0.9, 0.99):
        less_s = part * min(lasting_s, 1e3)
        assert lasting_s == 0.0 or exposed_s(switches, less_s) >= spare * less_s - 1e-9


def attained(facts: list[BatchFacts], quotas: tuple[Quota, ...], rounds_run: int) -> list[float]:
    """The share of time in which no token is overdue, per batch, of rounds run step by step. The first token is out
    when its turn begins; one that is late puts off those after it.
    """
    now_s = 0.0
    first_s: list[float | None] = [None] * len(facts)
    due_s, overdue_s, last_s = ([0.0] * len(facts) for _ in range(3))
    for _ in range(rounds_run):
        for i, (one, quota) in enumerate(zip(facts, quotas, strict=True)):
            hidden_s = quotas[i - 1].quota_s if one.prefetched and len(facts) > 1 else 0.0
            now_s += max(one.switch_s - hidden_s, 0.0)
            if first_s[i] is None:
                first_s[i], due_s[i] = now_s, now_s + one.tbt_s
            for _ in range(round(quota.quota_s / one.step_s)):
                now_s += one.step_s
                overdue_s[i] += max(now_s - due_s[i], 0.0)
                due_s[i] = max(now_s, due_s[i]) + one.tbt_s
            last_s[i] = now_s
    return [1 - overdue_s[i] / (last_s[i] - (first_s[i] or 0.0)) for i in range(len(facts))]


@given(rounds)
@settings(max_examples=40)
def test_a_round_keeps_what_alpha_promises(facts: list[BatchFacts]) -> None:
    """Each batch is inside its deadlines for min(1, 1 / alpha) of the time, when quotas are of whole steps."""
    plan = plan_round(facts, DecodeSettings())
    whole = tuple(
        replace(quota, quota_s=math.ceil(quota.quota_s / one.step_s - 1e-9) * one.step_s)
        for quota, one in zip(plan.quotas, facts, strict=True)
    )
    rounding = max(a.quota_s / b.quota_s for a, b in zip(whole, plan.quotas, strict=True))
    promised = min(1.0, 1 / plan.alpha) / rounding
    for share in attained(facts, whole, 30):
        assert share >= promised - 0.05  # the ends of the first and the last round are not those of the long run


@pytest.mark.parametrize("step_s", [0.02, 0.03, 0.05, 0.1])
def test_overload_keeps_exactly_its_share(step_s: float) -> None:
    facts = [batch(m, step_s, 0.1, 1.5) for m in "abcd"]
    plan = plan_round(facts, SETTINGS)
    assert plan.alpha > 1
    assert attained(facts, plan.quotas, 60) == pytest.approx([1 / plan.alpha] * 4, abs=0.01)


def test_a_round_in_turns() -> None:
    state, facts = RoundState(), batches("abc")
    seen = []
    for now_s in (0.0, 2.9, 3.0, 5.9, 6.0, 9.0):
        turn, state = choose_decode_turn(facts, state, now_s, SETTINGS)
        assert turn is not None
        seen.append((turn.model, state.ends_s, turn.next_model))
    assert seen == [
        ("a", 3.0, "b"),
        ("a", 3.0, "b"),
        ("b", 6.0, "c"),
        ("b", 6.0, "c"),
        ("c", 9.0, "a"),
        ("a", 12.0, "b"),  # the next round, in the same order
    ]


def test_alone_no_model_follows_and_a_newcomer_waits_for_the_quota_at_most() -> None:
    turn, state = choose_decode_turn(batches("a"), RoundState(), 0.0, SETTINGS)
    assert turn is not None
    assert (turn.model, turn.next_model) == ("a", None)
    turn, later = choose_decode_turn(batches("a"), state, 500.0, SETTINGS)
    assert turn is not None
    assert (turn.model, turn.next_model) == ("a", None)
    turn, joined = choose_decode_turn(batches("ab"), later, 500.0, SETTINGS)
    assert turn is not None
    assert (turn.model, turn.next_model) == ("a", "b")
    assert joined.ends_s <= 500.0 + SETTINGS.quota_max_s
    turn, _ = choose_decode_turn(batches("ab"), state, 500.0, SETTINGS)
    assert turn is not None
    assert turn.model == "b"


def test_a_newcomer_gets_the_next_turn_and_not_the_next_round() -> None:
    _, state = choose_decode_turn(batches("abc"), RoundState(), 0.0, SETTINGS)
    alpha = state.alpha
    turn, state = choose_decode_turn(batches("abcd"), state, 1.0, SETTINGS)
    assert turn is not None
    assert (turn.model, turn.next_model, state.alpha) == ("a", "d", alpha)
    turn, grown = choose_decode_turn(batches("abcd"), state, 3.0, SETTINGS)
    assert turn is not None
    assert (turn.model, turn.next_model) == ("d", "b")
    assert grown.alpha > alpha
    turn, state = choose_decode_turn(batches("abc"), grown, 4.0, SETTINGS)
    assert turn is not None
    assert (turn.model, state.alpha) == ("b", grown.alpha)  # the higher alpha stays for the round
    assert [quota.model for quota in state.quotas] == ["a", "d", "b", "c"]


def test_a_newcomer_does_not_lower_the_load_of_the_round() -> None:
    _, state = choose_decode_turn(batches("abcde"), RoundState(), 0.0, SETTINGS)
    turn, after = choose_decode_turn(batches("ef"), state, 1.0, SETTINGS)
    assert turn is not None
    assert (turn.model, after.alpha) == ("f", state.alpha)


def test_one_turn_a_round() -> None:
    """A model that comes back in the same round waits for the next one."""
    _, state = choose_decode_turn(batches("abc"), RoundState(), 0.0, SETTINGS)
    turn, state = choose_decode_turn(batches("bc"), state, 1.0, SETTINGS)  # a loses its turn
    assert turn is not None
    assert (turn.model, turn.next_model) == ("b", "c")
    turn, _ = choose_decode_turn(batches("abc"), state, 4.0, SETTINGS)
    assert turn is not None
    assert (turn.model, turn.next_model) == ("c", "a")


@pytest.mark.parametrize("gone", [replace(batch("b"), ready=False), replace(batch("b"), sequences=0)])
def test_who_cannot_run_is_passed_over_and_not_forgotten(gone: BatchFacts) -> None:
    a, b, c = batches("abc")
    _, state = choose_decode_turn([a, b, c], RoundState(), 0.0, SETTINGS)
    turn, state = choose_decode_turn([a, gone, c], state, 3.0, SETTINGS)
    assert turn is not None
    assert turn.model == "c"
    turn, state = choose_decode_turn([a, b, c], state, 6.0, SETTINGS)
    assert turn is not None
    assert turn.model == "b"  # still in this round


def test_nothing_to_decode_is_no_load() -> None:
    _, state = choose_decode_turn(batches("ab"), RoundState(), 0.0, SETTINGS)
    assert choose_decode_turn([replace(batch("a"), ready=False)], state, 1.0, SETTINGS) == (None, RoundState())


def test_waits_are_forgiven_within_limits() -> None:
    _, state = choose_decode_turn(batches("ab"), RoundState(), 0.0, SETTINGS)
    assert state.waited(2.0).ends_s == state.ends_s + 2.0
    assert state.waited(2.0).waited(2.0).ends_s == state.ends_s + SETTINGS.quota_max_s


def test_a_prefilled_model_is_let_in_and_the_rest_of_the_turn_follows() -> None:
    _, state = choose_decode_turn(batches("abc"), RoundState(), 0.0, SETTINGS)
    state = let_in(batches("abcd"), state, "d", 1.0, SETTINGS)
    assert [quota.model for quota in state.quotas] == ["d", "a", "b", "c"]
    assert state.quotas[1].quota_s == pytest.approx(2.0)
    assert state.model == "d"


def test_let_in_brings_a_planned_turn_forward_and_gives_none_twice() -> None:
    _, state = choose_decode_turn(batches("abc"), RoundState(), 0.0, SETTINGS)
    ahead = let_in(batches("abc"), state, "c", 1.0, SETTINGS)
    assert [quota.model for quota in ahead.quotas] == ["c", "a", "b"]
    assert ahead.alpha == state.alpha
    back = let_in(batches("abc"), ahead, "a", 2.0, SETTINGS)
    assert back.model == "a"
    assert back.quotas[0].quota_s == pytest.approx(2.0)  # what was left of its turn, no new one
    _, second = choose_decode_turn(batches("abc"), state, 3.0, SETTINGS)
    assert let_in(batches("abc"), second, "a", 4.0, SETTINGS) == second  # had its turn
    assert let_in(batches("abc"), second, "x", 4.0, SETTINGS) == second  # nothing to run
    assert let_in(batches("a"), RoundState(), "a", 4.0, SETTINGS) == RoundState()


@given(
    models=st.integers(2, 6),
    step_s=st.floats(0.01, 1.0),
    present=st.lists(st.integers(0, 63), min_size=50, max_size=100),
    prefilled=st.lists(st.integers(0, 5), min_size=150, max_size=150),
)
@settings(max_examples=30)
def test_no_batch_starves(models: int, step_s: float, present: list[int], prefilled: list[int]) -> None:
    """Others come, go and are let in as they like: m0 runs again within two turns of each."""
    settings_ = DecodeSettings(quota_max_s=1.0)
    bound_s = 2 * models * (settings_.quota_max_s + 2 * step_s)
    state, now_s, ran_s = RoundState(), 0.0, 0.0
    for bits, let in zip(present, prefilled, strict=False):
        facts = [batch(f"m{i}", step_s) for i in range(models) if i == 0 or bits >> i & 1]
        state = let_in(facts, state, f"m{let}", now_s, settings_)
        turn, state = choose_decode_turn(facts, state, now_s, settings_)
        assert turn is not None
        assert turn.model in {one.model for one in facts}
        assert turn.next_model != turn.model
        assert len(state.quotas) == len({quota.model for quota in state.quotas}) <= models
        now_s += step_s
        if turn.model == "m0":
            ran_s = now_s
        assert now_s - ran_s <= bound_s


@pytest.mark.parametrize("wrong", [{"quota_min_s": 0.0}, {"quota_min_s": 5.0}, {"alpha_min": 0.0}])
def test_settings_that_leave_no_quota_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DecodeSettings(**wrong)
