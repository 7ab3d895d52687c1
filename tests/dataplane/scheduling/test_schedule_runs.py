"""No kind of work and no model starves when a slot is run step by step."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.ordering import Order
from dataplane.scheduling.prefill import PrefillQueue, PrefillRequest, PrefillSettings
from dataplane.scheduling.schedule import SlotState, Turn, TurnSettings, choose_turn
from dataplane.scheduling.tiers import TIER_OBJECTIVES
from tests.dataplane.scheduling.slots import PREFILL_S, SETTINGS, STEP_S, SWITCH_S, batch, slot


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
        request = PrefillRequest(
            request_id=name,
            model=model,
            tokens=100,
            tier=tier,
            arrived_s=self.now_s,
            ttft_s=TIER_OBJECTIVES[tier].ttft_s,
        )
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

    def serve(self, arrivals: list[tuple[str, Tier, int]]) -> None:
        """Requests of these models and tiers, with so many steps after each, to the end of all."""
        for index, (model, tier, steps) in enumerate(arrivals):
            self.arrive(f"{model}{index}", model, tier)
            for _ in range(steps):
                self.step()
        for _ in range(len(arrivals) * 60):
            if not self.queue.groups and not self.left:
                break
            self.step()
        assert not self.left
        assert len(self.first_s) == len(arrivals)

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
@settings(max_examples=40)
def test_all_are_served_and_none_waits_long(arrivals: list[tuple[str, Tier, int]], order: Order, share: float) -> None:
    """Random arrivals: every request is prefilled and decoded to its end, and no model waits for more than each other
    model's turn (twice, as it may just have had its own) stretched by the share that prefill takes.
    """
    decode = DecodeSettings(quota_max_s=1.0)
    prefill = PrefillSettings(order=order)
    node = Slot(settings=TurnSettings(prefill=prefill, decode=decode, prefill_share=share))
    node.serve(arrivals)
    turn_s = decode.quota_max_s + SWITCH_S + STEP_S
    bound_s = 12 * turn_s / (1 - share) + SETTINGS.burst_s / (1 - share) + SWITCH_S + PREFILL_S
    assert max(node.gap_s.values()) < bound_s
