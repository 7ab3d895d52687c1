"""What every engine must do: one suite, run against each factory of `tests.contracts.engines.ENGINES`."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from dataplane.engines.interface import Engine, EngineRequest, KvHandle, TokenScore
from dataplane.protocol.errors import BadRequestError, ContextLengthError, ModelLoadError, UnknownInstanceError
from tests.contracts.engines import CONTEXT_TOKENS, KV_TOKENS, PREFILL_TOKENS_PER_STEP_MAX, Subject, ask
from tests.dataplane.engines.torch.drive import drain


def test_a_request_ends_after_max_tokens_and_leaves_nothing_behind(engine: Engine) -> None:
    assert not engine.has_work()
    assert engine.step() == []
    engine.add(ask("r"))
    assert engine.has_work()
    gathered = drain(engine)
    assert len(gathered.tokens["r"]) == 10
    assert gathered.finished == {"r": "length"}
    stats = engine.stats()
    assert (stats.instances[0].kv_used_bytes, stats.instances[0].remaining_tokens) == (0, 0)
    assert (stats.tokens_total, stats.steps_total >= 10) == (10, True)
    assert engine.step() == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_do_not_depend_on_the_company(engine: Engine, temperature: float) -> None:
    alone = {}
    names = ["one", "two", "three", "four", "five", "six"]
    asked = {name: ask(name, 5 + 3 * n, temperature=temperature, seed=n) for n, name in enumerate(names)}
    for name in names:
        engine.add(asked[name])
        alone.update(drain(engine).tokens)
    together = drain(engine, later={n: [asked[name]] for n, name in enumerate(names)})
    assert together.tokens == alone
    assert len(set(alone.values())) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_continued_anywhere_makes_the_same_tokens(engine: Engine, temperature: float) -> None:
    engine.add(ask("r", temperature=temperature, seed=11))
    whole = drain(engine).tokens["r"]
    for made in (1, 6, 9):
        engine.add(ask("r", temperature=temperature, seed=11, generated=whole[:made]))
        gathered = drain(engine)
        assert gathered.tokens["r"] == whole[made:]
        assert gathered.finished["r"] == "length"
    engine.add(ask("r", generated=whole))
    assert engine.has_work()
    gathered = drain(engine)
    assert (gathered.tokens["r"], gathered.finished["r"]) == ((), "length")


ADJUSTED: dict[str, Any] = {
    "ignore_eos": False,
    "min_tokens": 10,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.4,
    "logit_bias": ((5, 2.0), (6, -3.0)),
    "top_k": 40,
    "min_p": 0.01,
    "logprobs": 3,
}
"""Parameters of an answer whose tokens depend on all tokens before them."""


def check_scores(scores: Sequence[TokenScore], expected: Sequence[TokenScore]) -> None:
    """That log probabilities differ by rounding alone."""
    assert len(scores) == len(expected)
    for one, other in zip(scores, expected, strict=True):
        values, others = ([score.logprob, *(value for _, value in score.top)] for score in (one, other))
        assert values == pytest.approx(others, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_and_scores_are_the_same_continued_and_in_company(engine: Engine, temperature: float) -> None:
    def asked(name: str, **fields: Any) -> EngineRequest:
        return ask(name, 5 + len(name), **{**ADJUSTED, "temperature": temperature, "seed": 11, **fields})

    engine.add(asked("r"))
    alone = drain(engine)
    whole, scores = alone.tokens["r"], alone.scores["r"]
    assert (len(whole), len(scores)) == (10, 10)
    for score in scores:
        values = [value for _, value in score.top]
        assert (len(values), values) == (3, sorted(values, reverse=True))
        assert score.logprob <= values[0] <= 0
    for made in range(1, 10):
        engine.add(asked("r", generated=whole[:made]))
        rest = drain(engine)
        assert rest.tokens["r"] == whole[made:]
        check_scores(rest.scores["r"], scores[made:])
    company = [ask("plain", temperature=temperature, seed=3), asked("other", logprobs=0, frequency_penalty=0.0)]
    together = drain(engine, later={0: company, 2: [asked("r")]})
    assert together.tokens["r"] == whole
    check_scores(together.scores["r"], scores)
    assert together.scores["plain"] == ()
    assert [score.top for score in together.scores["other"]] == [()] * 10


def test_the_seed_matters_when_sampling_and_not_when_greedy(engine: Engine) -> None:
    made = {}
    for temperature in (0.0, 1.0):
        for seed in (1, 2):
            engine.add(ask("r", temperature=temperature, seed=seed))
            made[temperature, seed] = drain(engine).tokens["r"]
    assert made[0.0, 1] == made[0.0, 2]
    assert made[1.0, 1] != made[1.0, 2]


def test_what_cannot_run_is_refused_and_leaves_nothing(engine: Engine) -> None:
    with pytest.raises(UnknownInstanceError):
        engine.add(ask("r", instance_id="nobody"))
    with pytest.raises(ContextLengthError):
        engine.add(ask("r", CONTEXT_TOKENS - 9))
    with pytest.raises(BadRequestError):
        engine.add(ask("r", 0))
    assert not engine.has_work()
    engine.add(ask("r"))
    with pytest.raises(BadRequestError):
        engine.add(ask("r"))
    assert len(drain(engine).tokens["r"]) == 10


def test_it_tells_how_long_steps_take_once_some_ran(engine: Engine) -> None:
    before = engine.stats().instances[0]
    assert (before.prefill_s, before.decode_s) == (None, None)
    engine.add(ask("r", 20, max_tokens=10))
    drain(engine)
    decode_s = engine.stats().instances[0].decode_s
    assert decode_s is not None
    assert decode_s > 0


def test_more_than_the_whole_kv_cache_is_refused_and_all_of_it_is_not(engine: Engine) -> None:
    stats = engine.stats().instances[0]
    one = ask("one", 1, max_tokens=1)
    engine.add(one)
    drain(engine)
    fits = max(n for n in range(1, CONTEXT_TOKENS) if _accepts(engine, ask("probe", n, max_tokens=4)))
    assert stats.kv_capacity_bytes > 0
    assert KV_TOKENS - 8 <= fits + 4 <= CONTEXT_TOKENS
    engine.add(ask("largest", fits, max_tokens=4))
    assert len(drain(engine).tokens["largest"]) == 4


def _accepts(engine: Engine, probe: EngineRequest) -> bool:
    try:
        engine.add(probe)
    except ContextLengthError:
        return False
    engine.cancel(probe.request_id)
    return True


def test_cancel_frees_at_once_and_nothing_more_is_heard(engine: Engine) -> None:
    for name in ("gone", "stays", "never-ran"):
        engine.add(ask(name, 20, max_tokens=20))
    engine.cancel("never-ran")
    for _ in range(4):
        engine.step()
    before = engine.stats().instances[0]
    engine.cancel("gone")
    after = engine.stats().instances[0]
    assert after.kv_used_bytes < before.kv_used_bytes
    assert (before.running + before.waiting, after.running + after.waiting) == (2, 1)
    engine.cancel("gone")
    engine.cancel("unheard-of")
    assert set(drain(engine).tokens) == {"stays"}
    assert engine.stats().instances[0].kv_used_bytes == 0


def test_unload_ends_its_requests_with_an_error_and_no_others(engine: Engine, subject: Subject) -> None:
    engine.load("b", subject.models[1])
    for name, instance_id in (("first", "a"), ("second", "a"), ("other", "b")):
        engine.add(ask(name, instance_id=instance_id))
    engine.step()
    engine.unload("a")
    engine.unload("a")
    assert [stats.instance_id for stats in engine.stats().instances] == ["b"]
    with pytest.raises(UnknownInstanceError):
        engine.add(ask("third"))
    gathered = drain(engine)
    assert set(gathered.errors) == {"first", "second"}
    assert gathered.finished == {"other": "length"}
    assert len(gathered.tokens["other"]) >= 9


def test_a_model_that_does_not_fit_is_refused_and_the_rest_goes_on(engine: Engine, subject: Subject) -> None:
    engine.add(ask("r"))
    for spec in (subject.oversized, subject.models[1]):
        with pytest.raises(ModelLoadError):
            engine.load("a" if spec is subject.models[1] else "big", spec)
    with pytest.raises(UnknownInstanceError):
        engine.add(ask("x", instance_id="big"))
    assert len(drain(engine).tokens["r"]) == 10


def test_models_share_a_slot_by_turns(engine: Engine, subject: Subject) -> None:
    engine.load("b", subject.models[1])
    asked = [ask(name + "-" + where, instance_id=where, max_tokens=25) for name in "xy" for where in "ab"]
    expected = {}
    for one in asked:
        engine.add(one)
        expected.update(drain(engine).tokens)
    switches = engine.stats().switches_total
    for one in asked:
        engine.add(one)
    gathered = drain(engine)
    assert gathered.tokens == expected
    assert engine.stats().switches_total >= switches + 2
    assert set(engine.stats().resident_models) <= {model.name for model in subject.models}


def test_more_requests_than_kv_all_finish_with_the_tokens_they_make_alone(engine: Engine) -> None:
    asked = [ask(f"r{n}", 10 + n, max_tokens=30) for n in range(5)]
    expected = {}
    for one in asked:
        engine.add(one)
        expected.update(drain(engine).tokens)
    for one in asked:
        engine.add(one)
    peak_bytes = 0
    outputs = []
    while engine.has_work():
        outputs += engine.step()
        stats = engine.stats().instances[0]
        peak_bytes = max(peak_bytes, stats.kv_used_bytes)
        assert stats.kv_used_bytes <= stats.kv_capacity_bytes
    for one in asked:
        made = [token for output in outputs if output.request_id == one.request_id for token in output.token_ids]
        assert tuple(made) == expected[one.request_id]
    assert peak_bytes > engine.stats().instances[0].kv_capacity_bytes / 2


def test_the_urgent_tier_is_served_first(engine: Engine) -> None:
    for n in range(8):
        engine.add(ask(f"batch-{n}", tier="NIW"))
    engine.add(ask("urgent", tier="IW-F"))
    ended = []
    while engine.has_work():
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended.index("urgent") < 5


def test_stats_count_what_is_left_to_do(engine: Engine) -> None:
    for name in ("one", "two"):
        engine.add(ask(name))
    fresh = engine.stats().instances[0]
    assert (fresh.instance_id, fresh.running + fresh.waiting, fresh.remaining_tokens) == ("a", 2, 2 * 19)
    left = [fresh.remaining_tokens]
    while engine.has_work():
        engine.step()
        left.append(engine.stats().instances[0].remaining_tokens)
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0


def test_an_instance_comes_back_after_unload(engine: Engine, subject: Subject) -> None:
    engine.add(ask("r"))
    expected = drain(engine).tokens
    engine.unload("a")
    assert engine.stats().instances == ()
    engine.load("a", subject.models[0])
    engine.add(ask("r"))
    assert drain(engine).tokens == expected


def test_instances_share_the_kv_of_the_slot(engine: Engine, subject: Subject) -> None:
    engine.load("b", subject.models[1])
    engine.load("c", subject.models[1])
    idle = {stats.instance_id: stats.kv_capacity_bytes for stats in engine.stats().instances}
    assert idle["a"] > 0
    assert idle["b"] == idle["c"] > 0
    engine.add(ask("r", 20, max_tokens=30))
    while engine.stats().instances[0].kv_used_bytes == 0:
        engine.step()
    busy = {stats.instance_id: stats for stats in engine.stats().instances}
    assert busy["a"].kv_capacity_bytes == idle["a"], "its own and what is free"
    assert busy["b"].kv_capacity_bytes == busy["c"].kv_capacity_bytes < idle["b"]
    drain(engine)
    assert {stats.instance_id: stats.kv_capacity_bytes for stats in engine.stats().instances} == idle


def test_prepare_does_the_slow_part_and_may_be_repeated(subject: Subject) -> None:
    for _ in range(2):
        subject.engine.prepare(subject.models[0])
    assert subject.engine.stats().instances == ()
    with pytest.raises(ModelLoadError):
        subject.engine.prepare(subject.oversized)
    subject.engine.load("a", subject.models[0])
    subject.engine.add(ask("r"))
    assert len(drain(subject.engine).tokens["r"]) == 10


def hand_over(subject: Subject, asked: list[EngineRequest]) -> dict[str, EngineRequest]:
    """Let the prefill slot serve the requests: what is left of those that it hands over."""
    for one in asked:
        subject.prefiller.add(one)
    firsts: dict[str, tuple[int, ...]] = {one.request_id: () for one in asked}
    handles: dict[str, KvHandle] = {}
    while subject.prefiller.has_work():
        for output in subject.prefiller.step():
            assert output.request_id not in handles, "an output after the last one"
            firsts[output.request_id] += output.token_ids
            if output.kv is not None:
                handles[output.request_id] = output.kv
    assert all(len(first) == 1 for first in firsts.values())
    return {
        one.request_id: structs.replace(one, generated=firsts[one.request_id], kv=handles[one.request_id])
        for one in asked
        if one.request_id in handles
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_handed_over_makes_the_tokens_of_one_that_stays(
    engine: Engine, subject: Subject, temperature: float
) -> None:
    subject.prefiller.load("a", subject.models[0])
    lengths = (1, 5, PREFILL_TOKENS_PER_STEP_MAX - 1, PREFILL_TOKENS_PER_STEP_MAX, PREFILL_TOKENS_PER_STEP_MAX + 1)
    asked = [ask(f"r{n}", length, temperature=temperature, seed=n) for n, length in enumerate(lengths)]
    expected = {}
    for one in asked:
        engine.add(one)
        expected.update(drain(engine).tokens)
    for one in asked:  # one by one: the host memory of the prefill slot need not hold them all
        (handed,) = hand_over(subject, [one]).values()
        engine.add(handed)
        gathered = drain(engine)
        subject.prefiller.release(one.request_id)
        assert handed.generated + gathered.tokens[one.request_id] == expected[one.request_id]
        assert gathered.finished[one.request_id] == "length"


def test_a_request_handed_over_keeps_its_penalties_and_scores(engine: Engine, subject: Subject) -> None:
    subject.prefiller.load("a", subject.models[0])
    asked = ask("r", 20, **ADJUSTED)
    engine.add(asked)
    alone = drain(engine)
    subject.prefiller.add(asked)
    firsts = []
    while subject.prefiller.has_work():
        firsts += subject.prefiller.step()
    made, left = firsts
    engine.add(structs.replace(asked, generated=made.token_ids, kv=left.kv))
    rest = drain(engine)
    subject.prefiller.release("r")
    assert made.token_ids + rest.tokens["r"] == alone.tokens["r"]
    check_scores(made.scores + rest.scores["r"], alone.scores["r"])


def test_several_handed_over_together_decode_together(engine: Engine, subject: Subject) -> None:
    subject.prefiller.load("a", subject.models[0])
    for slot in (engine, subject.prefiller):
        slot.load("b", subject.models[1])
    asked = [ask(f"{where}{n}", 6 + n, instance_id=where) for n in range(3) for where in "ab"]
    expected = {}
    for one in asked:
        engine.add(one)
        expected.update(drain(engine).tokens)
    handed = hand_over(subject, asked)
    for one in handed.values():
        engine.add(one)
    gathered = drain(engine)
    assert {name: one.generated + gathered.tokens[name] for name, one in handed.items()} == expected


def test_a_request_whose_handed_over_kv_is_lost_makes_the_same_tokens(engine: Engine, subject: Subject) -> None:
    subject.prefiller.load("a", subject.models[0])
    engine.add(ask("r"))
    expected = drain(engine).tokens["r"]
    handed = hand_over(subject, [ask("r")])["r"]
    assert handed.kv is not None
    engine.add(structs.replace(handed, kv=structs.replace(handed.kv, file="/nowhere/kv")))
    assert handed.generated + drain(engine).tokens["r"] == expected


def test_handed_over_kv_is_kept_until_release(subject: Subject) -> None:
    subject.prefiller.load("a", subject.models[0])
    hand_over(subject, [ask("r", 20), ask("s", 20)])
    assert not subject.prefiller.has_work()
    both = _host_kv_bytes(subject.prefiller)
    with pytest.raises(BadRequestError, match="id r is in use"):
        subject.prefiller.add(ask("r", 20))
    subject.prefiller.release("r")
    subject.prefiller.release("unheard-of")
    _end_transfers(subject.prefiller)
    assert 0 < _host_kv_bytes(subject.prefiller) < both
    subject.prefiller.cancel("s")
    _end_transfers(subject.prefiller)
    assert _host_kv_bytes(subject.prefiller) == 0
    assert all(stats.kv_used_bytes == 0 for stats in subject.prefiller.stats().instances)


def _end_transfers(engine: Engine) -> None:
    """Step until no transfer uses memory that was freed."""
    for _ in range(10_000):
        pool = engine.stats().pool
        assert pool is not None
        if not any(shape.moving_bytes for shape in (*pool.kv, *pool.host_kv)):
            return
        engine.step()
    raise AssertionError("a transfer does not end")


def _host_kv_bytes(engine: Engine) -> int:
    pool = engine.stats().pool
    assert pool is not None
    return sum(shape.used_bytes for shape in pool.host_kv)


def test_a_request_that_ends_with_its_first_token_is_not_handed_over(subject: Subject) -> None:
    subject.prefiller.load("a", subject.models[0])
    subject.prefiller.add(ask("r", max_tokens=1))
    gathered = drain(subject.prefiller)
    assert (len(gathered.tokens["r"]), gathered.finished["r"]) == (1, "length")
    assert _host_kv_bytes(subject.prefiller) == 0


def test_the_pool_reports_its_turns(engine: Engine, subject: Subject) -> None:
    engine.load("b", subject.models[1])
    asked = [ask(name + "-" + where, instance_id=where, max_tokens=25) for name in "xy" for where in "ab"]
    for one in asked:
        engine.add(one)
    loads = set()
    while engine.has_work():
        engine.step()
        pool = engine.stats().pool
        assert pool is not None
        loads.add(pool.load)
    assert max(loads) > 0
    engine.step()
    pool = engine.stats().pool
    assert pool is not None
    assert (pool.running_model, pool.prefills_waiting, pool.load) == (None, 0, 0.0)
    assert all(turn.started_s <= turn.ended_s <= pool.now_s for turn in pool.time_slices)
    assert all(
        before.ended_s <= after.started_s for before, after in zip(pool.time_slices, pool.time_slices[1:], strict=False)
    )
    assert sum(turn.tokens for turn in pool.time_slices) == 4 * 25
    assert {turn.model for turn in pool.time_slices} == {model.name for model in subject.models}
    assert {turn.kind for turn in pool.time_slices} - {"mixed"} == {"prefill", "decode"}
