"""What a slot does next: the table of rules, and that no kind and no model starves when a slot is run step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.messages import Tier
from dataplane.turns.decode import BatchFacts, DecodeSettings
from dataplane.turns.ordering import Order
from dataplane.turns.prefill import PrefillQueue, PrefillRequest, PrefillSettings
from dataplane.turns.schedule import SlotFacts, SlotState, Turn, TurnSettings, choose_turn, settle_shares

SETTINGS = TurnSettings(near_s=0.25, burst_s=1.0, prefill=PrefillSettings(order="fcfs"))
SWITCH_S, PREFILL_S, STEP_S = 0.5, 0.2, 0.05


def batch(model: str, slack_s: float = 0.0, *, ready: bool = True) -> BatchFacts:
    return BatchFacts(
        model=model, sequences=1, step_s=STEP_S, tbt_s=0.1, switch_s=SWITCH_S, slack_s=slack_s, ready=ready
    )


def prefills(*entries: tuple[str, float, Tier]) -> PrefillQueue:
    """(model, arrived_s, tier); ids are the model and a number."""
    queue = PrefillQueue()
    for index, (model, arrived_s, tier) in enumerate(entries):
        request = PrefillRequest(request_id=f"{model}{index}", model=model, tokens=100, tier=tier, arrived_s=arrived_s)
        queue = queue.join(request, SETTINGS.prefill)
    return queue


def slot(
    queue: PrefillQueue, batches: Sequence[BatchFacts], running: str | None, unready: Sequence[str] = ()
) -> SlotFacts:
    """A slot that holds one model at a time."""
    models = {group.model for group in queue.groups} | {one.model for one in batches}
    return SlotFacts(
        prefills=queue,
        prefill_s=dict.fromkeys(models, PREFILL_S),
        switch_s={model: 0.0 if model == running else SWITCH_S for model in models},
        batches=tuple(batches),
        running_model=running,
        unready=frozenset(unready),
    )


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
    assert turn.reason


def test_one_tight_batch_holds_a_prefill_back() -> None:
    facts = slot(prefills(("c", 0.0, "IW-N")), [batch("a", 5.0), batch("b", 0.3)], "a")
    turn, _ = choose_turn(facts, decoding("a", "b"), 0.1, SETTINGS)
    assert turn is not None
    assert turn.kind == "decode"


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
        alpha=0.0,
        reason="first in order",
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


@dataclass(kw_only=True)
class Slot:
    """A slot run step by step, one model in its memory. Every request makes `tokens` tokens after its prefill."""

    settings: TurnSettings
    tokens: int = 20
    now_s: float = 0.0
    switches: int = 0
    running: str | None = None
    state: SlotState = field(default_factory=SlotState)
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    left: dict[str, tuple[str, int, float]] = field(default_factory=dict)  # id: model, tokens, next deadline
    first_s: dict[str, float] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})
    gap_s: dict[str, float] = field(default_factory=dict)  # longest wait of a model with something to decode
    ran_s: dict[str, float] = field(default_factory=dict)

    def arrive(self, name: str, model: str, tier: Tier) -> None:
        request = PrefillRequest(request_id=name, model=model, tokens=100, tier=tier, arrived_s=self.now_s)
        self.queue = self.queue.join(request, self.settings.prefill)

    def step(self) -> Turn | None:
        slack_s: dict[str, float] = {}
        for model, _, due_s in self.left.values():
            slack_s[model] = min(slack_s.get(model, 1e9), due_s - self.now_s)
        facts = slot(self.queue, [batch(model, slack) for model, slack in slack_s.items()], self.running)
        turn, self.state = choose_turn(facts, self.state, self.now_s, self.settings)
        if turn is None:
            self.now_s += STEP_S
            return None
        seconds = PREFILL_S if turn.kind == "prefill" else STEP_S
        if turn.model != self.running:
            self.switches, self.running, seconds = self.switches + 1, turn.model, seconds + SWITCH_S
        self.now_s += seconds
        self.state = self.state.spent(turn.kind, seconds)
        self.spent_s[turn.kind] += seconds
        for model in slack_s:
            self.gap_s[model] = max(self.gap_s.get(model, 0.0), self.now_s - self.ran_s[model])
        if turn.kind == "prefill":
            self._prefill(turn.group[0], turn.model)
        else:
            self._decode(turn.model)
        return turn

    def _prefill(self, name: str, model: str) -> None:
        self.queue = self.queue.remove(name)
        self.first_s[name] = self.now_s
        if not any(other == model for other, _, _ in self.left.values()):
            self.ran_s[model] = self.now_s
        self.left[name] = (model, self.tokens, self.now_s + 0.1)

    def _decode(self, model: str) -> None:
        assert any(other == model for other, _, _ in self.left.values())
        self.ran_s[model] = self.now_s
        for name, (other, tokens, due_s) in list(self.left.items()):
            if other == model:
                self.left[name] = (model, tokens - 1, max(due_s, self.now_s) + 0.1)
                if tokens == 1:
                    del self.left[name]


def test_a_one_model_slot_never_switches() -> None:
    node = Slot(settings=SETTINGS)
    for index in range(30):
        node.arrive(f"r{index}", "a", "IW-N")
        for _ in range(5):
            node.step()
    assert node.switches == 1
    assert len(node.first_s) == 30


@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_neither_kind_starves_under_a_stream_of_prefills(share: float, pauses: bool) -> None:
    """When a prefill is done the next one comes, soon due, at once or after a decode step (so that the queue runs
    empty): decode gets the rest of the time, and waits no longer than a burst and a turn take to make good.
    """
    settings_ = TurnSettings(prefill_share=share)
    node = Slot(settings=settings_, tokens=100_000)
    node.arrive("d", "a", "IW-F")
    node.step()
    for index in range(1000):
        turn = node.step()
        assert turn is not None
        if not node.queue.groups and not (pauses and turn.kind == "prefill"):
            node.arrive(f"r{index}", "b", "IW-F")
    taken = node.spent_s["prefill"] / sum(node.spent_s.values())
    assert taken <= share + 0.05
    if not pauses:
        assert taken >= share - 0.05
    burst_s = settings_.burst_s + SWITCH_S + PREFILL_S
    turn_s = settings_.decode.quota_max_s + SWITCH_S  # of the other model's batch
    assert node.gap_s["a"] < (burst_s + turn_s) / (1 - share)


def test_prefills_do_not_wait_for_decodes_that_are_always_late() -> None:
    """Decode has no token to spare and no deadline of a prefill is near; it waits for decode's burst at most."""
    node = Slot(settings=SETTINGS, tokens=10_000)
    for model in "abc":
        node.arrive(model, model, "IW-N")
    while len(node.left) < 3:
        node.step()
    for index in range(20):
        arrived_s = node.now_s
        node.arrive(f"r{index}", "d", "NIW")
        while f"r{index}" not in node.first_s:
            node.step()
        waited_s = node.first_s[f"r{index}"] - arrived_s
        assert waited_s < SETTINGS.burst_s / SETTINGS.prefill_share + 3 * (SWITCH_S + PREFILL_S)


@given(
    arrivals=st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.sampled_from(["IW-F", "IW-N", "NIW"]),
            st.integers(0, 40),
        ),
        min_size=1,
        max_size=60,
    ),
    order=st.sampled_from(["fcfs", "edf", "pf", "dpa"]),
    share=st.floats(0.1, 0.9),
)
@settings(deadline=None, max_examples=40)
def test_all_are_served_and_none_waits_long(arrivals: list[tuple[str, Tier, int]], order: Order, share: float) -> None:
    """Random arrivals: every request is prefilled and decoded to its end, and no model waits for more than each other
    model's turn (twice, as it may just have had its own) stretched by the share that prefill takes.
    """
    decode = DecodeSettings(quota_max_s=1.0)
    prefill = PrefillSettings(order=order)
    node = Slot(settings=TurnSettings(prefill=prefill, decode=decode, prefill_share=share))
    for index, (model, tier, steps) in enumerate(arrivals):
        node.arrive(f"{model}{index}", model, tier)
        for _ in range(steps):
            node.step()
    for _ in range(len(arrivals) * 60):
        if not node.queue.groups and not node.left:
            break
        node.step()
    assert not node.left
    assert len(node.first_s) == len(arrivals)
    turn_s = decode.quota_max_s + SWITCH_S + STEP_S
    bound_s = 12 * turn_s / (1 - share) + SETTINGS.burst_s / (1 - share) + SWITCH_S + PREFILL_S
    assert max(node.gap_s.values()) < bound_s


seconds = st.floats(0.0, 2.0)
waiting = st.sampled_from([(True, True), (True, False), (False, True)])


@settings(max_examples=50, deadline=None)
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
