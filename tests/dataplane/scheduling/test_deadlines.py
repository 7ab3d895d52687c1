"""Slices by deadlines: whose slice is next, when it ends, and what may interrupt it."""

import math

import pytest

from dataplane.scheduling.deadlines import BATCH_ROUNDS, ROUNDS, ModelWork, SliceState, choose_slice, prompts_aside
from dataplane.scheduling.decode import DecodeSettings

LOAD_S, NEAR_S = 1.5, 0.25
SETTINGS = DecodeSettings(quota_min_s=0.05, quota_max_s=4.0)
RUNNING = SliceState(model="a", began_s=10.0)
"""Model a runs since 10."""


def work(
    model: str,
    due_s: float = 1000.0,
    *,
    missing_s: float = 0.0,
    load_s: float = LOAD_S,
    prompts: bool = False,
    background: bool = False,
) -> ModelWork:
    return ModelWork(
        model=model,
        due_s=due_s,
        missing_s=missing_s,
        load_s=load_s,
        prompts=prompts,
        prefill_s=0.1,
        background=background,
    )


def choose(state: SliceState, now_s: float, *models: ModelWork) -> tuple[str, tuple[str, ...], SliceState]:
    choice, after = choose_slice(models, state, now_s, near_s=NEAR_S, settings=SETTINGS)
    return choice.model, choice.following, after


def test_the_first_to_be_due_runs_and_the_others_follow_by_due_time() -> None:
    model, following, state = choose(SliceState(), 10.0, work("a", 30.0), work("b", 20.0, missing_s=1.0), work("c", 25))
    assert (model, following) == ("b", ("c", "a"))
    assert state.began_s == 11.0, "when its weights are there"


def test_a_model_alone_runs_without_an_end() -> None:
    assert choose(RUNNING, 99.0, work("a", 0.0))[2].ends_s == math.inf


@pytest.mark.parametrize(("load_s", "slice_s"), [(0.0, 0.05), (1.5, 1.5), (9.0, 4.0)])
def test_a_slice_lasts_as_long_as_the_longest_load_within_the_limits_of_a_quota(load_s: float, slice_s: float) -> None:
    models = work("a", load_s=0.0), work("b", 0.0, load_s=load_s)
    assert choose(RUNNING, 10.0 + slice_s - 0.01, *models)[0] == "a", "however late b is"
    now_s = 10.0 + slice_s + 0.01
    model, _, state = choose(RUNNING, now_s, *models)
    assert model == "b"
    waits_s = max(2 * ROUNDS * slice_s - NEAR_S, slice_s)
    assert state.ends_s == pytest.approx(now_s + waits_s), "a waits for no more than two rounds"


@pytest.mark.parametrize(
    ("share", "load_s", "slice_s"),
    [(0.2, 1.0, 1.0), (0.75, 1.0, 3.0), (0.9, 1.0, 4.0), (1.5, 1.0, 4.0), (1.5, 0, 0.05)],
)
def test_where_loads_are_waited_for_a_slice_leaves_batches_their_share(
    share: float, load_s: float, slice_s: float
) -> None:
    models = work("a", load_s=0.0), work("b", 0.0, load_s=load_s)
    choice, _ = choose_slice(models, RUNNING, 10.0, near_s=NEAR_S, settings=SETTINGS, exposed_share=share)
    assert choice.slice_s == pytest.approx(slice_s)
    if share <= 0.75 and load_s:
        assert slice_s / (slice_s + load_s) >= share


def test_it_goes_on_until_the_others_can_just_begin_in_time() -> None:
    """The first has to be loaded; the second waits for a slice of the first."""
    models = work("a"), work("b", 14.0, missing_s=1.0), work("c", 15.0)
    state = choose(RUNNING, 10.0, *models)[2]
    assert state.ends_s == pytest.approx(15.0 - LOAD_S - NEAR_S - 1.0)
    assert choose(state, 12.2, *models)[0] == "a"
    assert choose(state, 12.3, *models)[0] == "b"


def test_models_that_are_late_take_turns() -> None:
    """Model a is later than b, however often it ran; c has just come and is not late at all."""
    models = work("a", -100.0), work("b", -90.0), work("c", 1000.0, prompts=True)
    ran, state, now_s = [], RUNNING, 10.0
    for _ in range(12):
        now_s += LOAD_S + 0.01
        model, _, state = choose(state, now_s, *models)
        ran.append(model)
    assert ran == ["b", "a", "b", "a", "b", "a", "b", "c", "a", "b", "a", "b"], "c has a slice after two rounds"


def test_models_that_cannot_run_for_a_while_wait_on() -> None:
    def after(state: SliceState, now_s: float, *models: ModelWork, held: str) -> SliceState:
        return choose_slice(models, state, now_s, near_s=NEAR_S, settings=SETTINGS, held=held)[1]

    state = after(RUNNING, 10.5, work("a", 0.0), held="ab")
    state = after(state, 11.0, work("a", 0.0), held="abc")
    assert state.since_s == {"b": 10.5, "c": 11.0}
    assert after(state, 12.0, work("a", 0.0), held="ac").since_s == {"c": 11.0}, "b has no requests any more"
    state = after(state, 18.6, work("a", 0.0), work("b", 99.0), work("c", 98.0), held="abc")
    assert (state.model, state.since_s["a"]) == ("b", 18.6), "it waited longest"


def test_a_prompt_of_another_model_ends_it() -> None:
    models = work("a"), work("b", 14.0), work("c", 15.0, prompts=True)
    assert choose(RUNNING, 11.4, *models)[0] == "a"
    assert choose(RUNNING, 11.6, *models)[0] == "b", "the first to be due is next, not the prompt"
    assert choose(SliceState(model="b", began_s=11.6), 13.2, *models)[0] == "c"


def test_the_model_that_ran_last_is_not_next_however_late_it_is() -> None:
    assert choose(RUNNING, 11.6, work("a", 0.0), work("b", 30.0), work("c", 50.0, prompts=True))[0] == "b"


def test_a_slice_whose_weights_are_late_begins_when_they_are_there() -> None:
    _, _, state = choose(RUNNING, 12.0, work("a", missing_s=0.5), work("b", 0.0))
    assert (state.model, state.began_s) == ("a", 12.5)


def test_models_that_cannot_run_are_tried_after_all_others_and_again_after_a_slice() -> None:
    models = work("a", 1.0), work("b", 2.0), work("c", 3.0)
    order, state, now_s = [], SliceState(), 10.0
    for _ in range(2):
        model, _, state = choose(state, now_s, *models)
        order.append(model)
        state = state.cut_short(model)
    model, _, state = choose(state, now_s, *models)
    order.append(model)
    assert order == ["a", "b", "c"]
    assert choose(state, now_s + 1.0, *models)[0] == "c", "it runs for a slice"
    assert choose(state, now_s + 2.0, *models)[0] == "a"


def test_where_no_model_can_run_all_are_tried_in_turn() -> None:
    tried, state = [], SliceState()
    for number in range(40):
        model, _, state = choose(state, 10.0 + number, work("a", 1.0), work("b", 2.0), work("c", 3.0))
        tried.append(model)
        state = state.cut_short(model)
    assert set(tried[-10:]) == {"a", "b", "c"}


@pytest.mark.parametrize(("due_s", "next_model"), [(13.0, "b"), (30.0, "n")])
def test_batch_requests_run_where_all_others_can_wait_for_a_slice(due_s: float, next_model: str) -> None:
    models = work("a", due_s + 5), work("b", due_s), work("n", 9e4, prompts=True, background=True)
    assert choose(RUNNING, 11.6, *models)[0] == next_model


def test_batch_requests_of_a_model_that_has_to_be_loaded_run_where_all_others_can_wait_for_that_too() -> None:
    """Model n ran last, and m is the other one with batch requests."""
    state = SliceState(model="n", began_s=10.0)
    n, m = work("n", 9e4, background=True), work("m", 9e5, background=True, missing_s=1.5)
    assert choose(state, 11.6, work("a", 14.0), n, m)[0] == "a", "it would begin at 14.6"
    assert choose(state, 11.6, work("a", 15.0), n, m)[0] == "m"


def test_batch_requests_have_minimal_slices_and_never_keep_a_late_model_from_running() -> None:
    models = work("a", 50.0), work("n", 9e4, background=True)
    model, _, state = choose(RUNNING, 11.6, *models)
    assert (model, state.ends_s) == ("n", 11.6 + LOAD_S)
    assert choose(state, 13.2, *models)[0] == "a"
    assert choose(RUNNING, 11.6, work("a", 12.0), work("n", 9e4, background=True))[0] == "a"
    assert choose(SliceState(), 11.6, work("n", 9e4, background=True))[0] == "n"


def test_batch_requests_have_a_slice_in_twenty_rounds_however_late_the_others_are() -> None:
    models = work("a", 0.0, prompts=True), work("b", 0.0, prompts=True), work("n", 9e4, prompts=True, background=True)
    ran, state, now_s = [], SliceState(), 10.0
    for _ in range(200):
        model, _, state = choose(state, now_s, *models)
        ran.append(model)
        now_s += LOAD_S
    rounds = ran.index("n") / len(models)
    assert BATCH_ROUNDS <= rounds <= BATCH_ROUNDS + 1
    assert 2 <= ran.count("n") <= 200 / len(models) / BATCH_ROUNDS


@pytest.mark.parametrize(
    ("due_s", "other", "aside"),
    [
        (10.2, work("b", prompts=True), "b"),
        (10.05, work("b", prompts=True), None),  # the prefill takes 0.1 s, and a token would be late
        (10.2, work("b", prompts=True, missing_s=0.1), None),
        (10.2, work("b"), None),
        (10.2, work("b", prompts=True, background=True), None),
    ],
)
def test_prompts_of_a_loaded_model_are_prefilled_within_the_slice(
    due_s: float, other: ModelWork, aside: str | None
) -> None:
    assert prompts_aside([work("a", due_s), other], "a", 10.0) == aside
