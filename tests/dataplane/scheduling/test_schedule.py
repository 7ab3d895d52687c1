"""What a slot does next: the table of rules."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.prefill import PrefillQueue
from dataplane.scheduling.schedule import SlotState, Turn, TurnSettings, choose_turn, hold_prefills, settle_shares
from tests.dataplane.scheduling.slots import SETTINGS, SWITCH_S, batch, prefills, slot


def decoding(model: str, others: str = "") -> SlotState:
    """The state in which `model` decodes, since 0."""
    batches = [batch(name) for name in model + others]
    return choose_turn(slot(PrefillQueue(), batches, model), SlotState(), 0.0, SETTINGS)[1]


@pytest.mark.parametrize(
    ("arrived_s", "tier", "slack_s", "now_s", "kind"),
    [
        (0.0, "IW-N", 0.0, 0.1, "decode"),  # due at 60, no token ahead
        (0.0, "IW-N", 1.19, 0.1, "decode"),  # a prefill and two switches take 1.2 s
        (0.0, "IW-N", 1.21, 0.1, "prefill"),
        (0.0, "IW-F", 0.0, 0.04, "decode"),  # due at 1.0; a switch, the prefill and 0.25 s before that is 0.05
        (0.0, "IW-F", 0.0, 0.06, "prefill"),
        (-9.0, "IW-F", -5.0, 0.1, "prefill"),  # overdue is urgent
        (0.0, "NIW", 9.0, 0.1, "prefill"),
        (0.0, "NIW", 0.0, 0.1, "decode"),
    ],
)
def test_a_prefill_of_another_model(arrived_s: float, tier: Tier, slack_s: float, now_s: float, kind: str) -> None:
    facts = slot(prefills(("b", arrived_s, tier)), [batch("a", slack_s)], "a")
    turn, _ = choose_turn(facts, decoding("a"), now_s, SETTINGS)
    assert turn is not None
    assert turn.kind == kind
    assert (turn.model, turn.next_model) == (("b", "a") if kind == "prefill" else ("a", "b"))


def test_one_tight_batch_holds_a_prefill_back() -> None:
    facts = slot(prefills(("c", 0.0, "IW-N")), [batch("a", 5.0), batch("b", 0.3)], "a")
    turn, _ = choose_turn(facts, decoding("a", "b"), 0.1, SETTINGS)
    assert turn is not None
    assert turn.kind == "decode"


@pytest.mark.parametrize(
    ("stuck", "owed", "kind"), [("a", None, "prefill"), ("b", None, "decode"), ("a", "decode", "decode")]
)
def test_a_batch_without_memory_lets_prefills_go_first_but_not_for_ever(stuck: str, owed: Any, kind: str) -> None:
    """Else the slot does nothing until a prompt that waits is nearly due."""
    facts = replace(slot(prefills(("c", 0.0, "IW-N")), [batch("a")], "a"), stuck=frozenset({stuck}))
    state = replace(decoding("a"), owed=owed, over_s=1.0 if owed else 0.0)
    turn, _ = choose_turn(facts, state, 0.1, SETTINGS)
    assert turn is not None
    assert turn.kind == kind


def test_one_model_prefills_at_once_and_never_switches() -> None:
    facts = slot(prefills(("a", 0.0, "NIW")), [batch("a", -3.0)], "a")
    turn, _ = choose_turn(facts, decoding("a"), 0.1, SETTINGS)
    assert turn is not None
    assert (turn.kind, turn.model, turn.next_model) == ("prefill", "a", None)


def test_a_group_that_was_begun_goes_on_while_its_weights_arrive() -> None:
    waiting = prefills(("b", 0.0, "IW-N"), ("b", 0.0, "IW-N"))
    turn, state = choose_turn(slot(waiting, [batch("a", 9.0)], "a"), decoding("a"), 0.1, SETTINGS)
    assert turn is not None
    assert turn.model == "b"
    late = slot(waiting.remove("b0"), [batch("a", -1.0)], "a")  # b is not resident yet
    turn, _ = choose_turn(late, state.spent("prefill", 0.2), 0.3, SETTINGS)
    assert turn is not None
    assert (turn.kind, turn.group) == ("prefill", ("b1",))


def test_what_a_kind_takes_alone_is_owed_to_nobody() -> None:
    waiting = prefills(("b", 0.0, "IW-F"))
    alone, both = slot(waiting, [], "b"), slot(waiting, [batch("a", -1.0)], "b")
    _, state = choose_turn(alone, SlotState(), 0.0, SETTINGS)
    _, state = choose_turn(alone, state.spent("prefill", 60.0), 60.0, SETTINGS)
    turn, state = choose_turn(both, state, 60.0, SETTINGS)
    assert turn is not None
    assert (turn.kind, state.over_s) == ("prefill", 0.0)
    turn, state = choose_turn(both, state.spent("prefill", 2.1), 62.1, SETTINGS)
    assert turn is not None
    assert (turn.kind, state.owed) == ("decode", "decode")  # over its share by 1.05 s
    turn, state = choose_turn(both, state.spent("decode", 1.9), 64.0, SETTINGS)
    assert turn is not None
    assert turn.kind == "decode"
    turn, state = choose_turn(both, state.spent("decode", 0.3), 64.3, SETTINGS)
    assert turn is not None
    assert (turn.kind, state.owed) == ("prefill", None)


def test_a_near_deadline_behind_the_front_counts() -> None:
    """Order is kept, so that the front group is served sooner for it."""
    facts = slot(prefills(("b", -9.0, "IW-N"), ("c", 0.0, "IW-F")), [batch("a")], "a")
    turn, _ = choose_turn(facts, decoding("a"), 0.5, SETTINGS)
    assert turn is not None
    assert (turn.kind, turn.model, turn.next_model) == ("prefill", "b", "c")


def test_prefill_alone_takes_group_after_group() -> None:
    facts = slot(prefills(("b", 0.0, "IW-N"), ("c", 1.0, "IW-N"), ("b", 2.0, "IW-F")), [], None)
    turn, state = choose_turn(facts, SlotState(), 3.0, SETTINGS)
    assert turn == Turn(
        kind="prefill",
        model="b",
        group=("b0", "b2"),
        started_s=3.0,
        next_model="c",
    )
    assert state.groups.serving == "b0"


@pytest.mark.parametrize("unready", [("b",), ("a", "b")])
def test_unready_models_wait(unready: tuple[str, ...]) -> None:
    facts = slot(prefills(("b", -9.0, "IW-F")), [batch("a", ready="a" not in unready)], None, unready)
    turn, state = choose_turn(facts, SlotState(), 0.0, SETTINGS)
    if "a" in unready:
        assert turn is None
        assert state == SlotState()
    else:
        assert turn is not None
        assert turn.model == "a"


def test_a_turn_keeps_its_start_until_kind_or_model_change() -> None:
    facts = slot(PrefillQueue(), [batch("a"), batch("b")], "a")
    starts = []
    state = SlotState()
    for now_s in (0.0, 1.0, 100.0, 100.5):
        turn, state = choose_turn(facts, state, now_s, SETTINGS)
        assert turn is not None
        starts.append((turn.model, turn.started_s))
    assert starts == [("a", 0.0), ("a", 0.0), ("b", 100.0), ("b", 100.0)]


def test_a_turn_is_longer_by_its_switch_by_prefills_and_by_waits() -> None:
    facts = slot(PrefillQueue(), [batch("a"), batch("b")], None)
    _, state = choose_turn(facts, SlotState(), 0.0, SETTINGS)
    quota_s = state.round.quotas[0].quota_s
    assert state.round.ends_s == pytest.approx(quota_s + SWITCH_S)
    assert state.spent("decode", 0.3).round.ends_s == pytest.approx(quota_s + SWITCH_S)
    assert state.spent("prefill", 0.3).round.ends_s == pytest.approx(quota_s + SWITCH_S + 0.3)
    assert state.spent("decode", 0.3, ran=False).round.ends_s == pytest.approx(quota_s + SWITCH_S + 0.3)


def test_a_model_just_prefilled_decodes_before_the_interrupted_turn_goes_on() -> None:
    state = decoding("a")
    turn, state = choose_turn(slot(prefills(("b", -9.0, "IW-F")), [batch("a")], "a"), state, 0.02, SETTINGS)
    assert turn is not None
    assert (turn.kind, turn.model) == ("prefill", "b")
    state = state.spent("prefill", 0.7)
    turn, state = choose_turn(slot(PrefillQueue(), [batch("a"), batch("b")], "b"), state, 0.72, SETTINGS)
    assert turn is not None
    assert (turn.kind, turn.model, turn.next_model) == ("decode", "b", "a")


@pytest.mark.parametrize("wrong", [{"prefill_share": 0.0}, {"prefill_share": 1.0}, {"near_s": -1.0}, {"burst_s": 0.0}])
def test_settings_that_starve_a_kind_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TurnSettings(**wrong)


seconds = st.floats(0.0, 2.0)
waiting = st.sampled_from([(True, True), (True, False), (False, True)])


@settings(max_examples=50)
@given(st.lists(st.tuples(seconds, seconds, waiting), max_size=12))
def test_with_one_model_that_needs_no_switch_the_account_of_shares_alone_decides(
    looks: list[tuple[float, float, tuple[bool, bool]]],
) -> None:
    state, over_s, owed = SlotState(), 0.0, None
    for number, (prefill_s, decode_s, (waits, decodes)) in enumerate(looks):
        queue = prefills(("a", float(number), "IW-F")) if waits else PrefillQueue()
        state = state.spent("prefill", prefill_s).spent("decode", decode_s)
        turn, state = choose_turn(slot(queue, [batch("a")] if decodes else [], "a"), state, float(number), SETTINGS)
        over_s, owed = settle_shares(
            over_s,
            owed,
            prefill_spent_s=prefill_s,
            decode_spent_s=decode_s,
            prefill=waits,
            decode=decodes,
            settings=SETTINGS,
        )
        assert turn is not None
        assert (turn.kind == "prefill") == (waits and not (decodes and owed == "decode"))


def test_if_a_model_has_no_memory_for_its_prefill_nor_its_decode_the_others_get_their_turns() -> None:
    """Only b can go on, and free the KV that a waits for. Waits take time, and no quota is longer than the least."""
    settings = TurnSettings(prefill=SETTINGS.prefill, decode=DecodeSettings(quota_min_s=0.05, quota_max_s=0.05))
    state, queue, now_s, held = SlotState(), prefills(("a", 0.0, Tier.IW_N)), 0.0, 0
    for _ in range(20):
        facts = slot(PrefillQueue() if held else queue, [batch("b"), batch("a")], "a")
        turn, state = choose_turn(facts, state, now_s, settings)
        assert turn is not None
        if turn.model == "b":
            return
        now_s += 0.006
        held = hold_prefills(held, turn.kind, ran=False, made_tokens=False, freeing=False, batches=2)
        state = state.spent(turn.kind, 0.005, ran=False)
        if turn.kind == "decode":
            state = state.cut_short(now_s)
    pytest.fail("b never had its turn")
