"""KV in the places of layers: models give them up, run without them, get them back, and no token shows it."""

import random

import pytest

from dataplane.engines.torch.streams import CopyStream, ThreadStream
from dataplane.remapping.settings import RemapSettings
from tests.dataplane.engines.torch.deep import (
    Deep,
    Undisturbed,
    drain_outputs,
    loaded,
    pool_of,
    run_dry,
    slot,
    steps_until,
    wants,
)
from tests.dataplane.engines.torch.drive import Gathered, request
from tests.dataplane.engines.torch.faults import FaultyStream
from tests.dataplane.engines.torch.tiny import greedy_tokens

NAMES = ("llama", "qwen2", "gemma3_text")
"""qwen2 has tied embeddings; mixtral, which has experts, is compared with transformers below."""


def test_an_active_model_runs_on_while_its_layers_come_and_go(deep: Deep, undisturbed: Undisturbed) -> None:
    requests = wants(["llama"], 8)
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1))
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    most = run_dry(engine, gathered)
    assert gathered.tokens == undisturbed(requests)
    assert most >= 3, "several layers deep"
    engine.step()
    pool = pool_of(engine)
    assert (pool.given_up, pool.slabs["kv"], pool.slabs["moving"]) == ({}, 0, 0)
    assert pool.layers_moved["lent"] == pool.layers_moved["taken back"] >= most
    assert pool.relief["remap"] > 0
    engine.close()


def test_inactive_models_give_up_first_and_their_prefill_begins_before_all_layers_are_back(
    deep: Deep, undisturbed: Undisturbed
) -> None:
    names = ["llama", "qwen2"]
    engine = loaded(deep, names, slot(deep, names, models_there=2, remap=RemapSettings(capped=False, settle_s=1e9)))
    gathered = Gathered()
    first, second = wants(["llama"], 6), wants(["qwen2"], 1)
    engine.add(second[0])
    gathered.take(drain_outputs(engine))
    for wanted in first:
        engine.add(wanted)
    steps_until(engine, gathered, lambda: engine._weights.given_up.get("qwen2", 0) >= 2)
    assert "llama" not in engine._weights.given_up
    late = request("late", second[0].prompt, instance_id="qwen2", max_tokens=4, ignore_eos=True)
    engine.add(late)
    steps_until(engine, gathered, lambda: "late" in gathered.tokens)
    run_dry(engine, gathered)
    assert gathered.tokens == undisturbed([*first, *second, late])
    engine.close()


@pytest.mark.parametrize("models_there", [1, 3])
def test_tokens_are_the_same_through_remap_revert_switch_cancel_and_faults(
    deep: Deep, undisturbed: Undisturbed, models_there: int
) -> None:
    """A burst of one model has it give up layers, then the others come: where the slot has not room for all, KV must
    leave the places of layers whenever another's turn comes.
    """
    chance = random.Random(models_there)

    def stream(name: str) -> CopyStream:
        inners = [ThreadStream(f"{name}-{number}") for number in range(2)]
        return FaultyStream(inners, random.Random(f"{models_there} {name}"), delay_s=0.001, fail_share=0.15)

    engine = loaded(deep, NAMES, slot(deep, NAMES, models_there=models_there), stream)
    burst, others = wants(NAMES[:1], 5), wants(NAMES[1:], 2)
    chance.shuffle(others)
    gathered, cancelled = Gathered(), set()
    for wanted in burst:
        engine.add(wanted)
    steps_until(engine, gathered, lambda: sum(engine._weights.given_up.values()) >= 2)
    for wanted in others:
        engine.add(wanted)
        for _ in range(chance.randrange(6)):
            gathered.take(engine.step())
        victim = chance.choice([*burst, *others]).request_id
        if chance.random() < 0.3 and victim not in gathered.finished:
            engine.cancel(victim)
            cancelled.add(victim)
        engine.check()
    run_dry(engine, gathered)
    expected = undisturbed([*burst, *others])
    assert gathered.errors == {}
    for request_id in set(expected) - cancelled:
        assert gathered.tokens[request_id] == expected[request_id], request_id
    pool = pool_of(engine)
    assert (pool.slabs["kv"], pool.slabs["moving"]) == (0, 0)
    engine.close()


def test_a_model_without_all_its_layers_waits_for_its_host_copy_where_that_left(
    deep: Deep, undisturbed: Undisturbed
) -> None:
    requests = wants(["llama"], 6)
    engine = loaded(deep, ["llama"], slot(deep, ["llama"], models_there=1))
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    steps_until(engine, gathered, lambda: sum(engine._weights.given_up.values()) >= 2)
    engine._host._part(engine._models["llama"].weights)
    assert run_dry(engine, gathered) >= 2
    assert gathered.tokens == undisturbed(requests)
    engine.close()


def test_a_load_that_never_comes_fails_the_models_requests_and_nothing_else(
    deep: Deep, undisturbed: Undisturbed
) -> None:
    names = ["llama", "qwen2"]
    engine = loaded(deep, names, slot(deep, names, models_there=2))
    for wanted in wants(["llama"], 6):
        engine.add(wanted)
    gathered = Gathered()
    steps_until(engine, gathered, lambda: engine._weights.given_up.get("llama", 0) >= 2)
    good = engine._weights._stream
    engine._weights._stream = FaultyStream([good], random.Random(0), fail_share=1.0, fails_in_a_row_max=10**6)
    steps_until(engine, gathered, lambda: bool(gathered.errors))
    engine._weights._stream = good
    other = wants(["qwen2"], 1)
    engine.add(other[0])
    run_dry(engine, gathered)
    assert all("the weights do not arrive" in error for error in gathered.errors.values())
    assert gathered.tokens["qwen2-0"] == undisturbed(other)["qwen2-0"]
    engine.close()


def test_the_tokens_are_those_of_transformers(deep: Deep) -> None:
    requests = wants(["mixtral"], 6, max_tokens=6)
    engine = loaded(deep, ["mixtral"], slot(deep, ["mixtral"], models_there=1))
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    assert run_dry(engine, gathered) > 0
    for wanted in requests:
        expected = greedy_tokens(deep("mixtral"), wanted.prompt, wanted.max_tokens)
        assert gathered.tokens[wanted.request_id][: len(expected)] == expected
    engine.close()
