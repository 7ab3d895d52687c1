"""The prefix cache changes no token, is no use of memory, and is shared by nobody who should not share."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.engines.torch.copies.cpu import ThreadStream
from dataplane.engines.torch.engine import TorchEngine
from dataplane.scheduling.deadlines import TimeSlices
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.torch.deep import Ticks
from tests.dataplane.engines.torch.drive import Gathered, drain, request, stepped
from tests.dataplane.engines.torch.faults import FaultyStream
from tests.dataplane.engines.torch.slots import SLAB_BYTES, slot_for_one
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, VOCABULARY, greedy_tokens, save_tiny, spec_of

BLOCK_TOKENS = 4
QUICK = TurnSettings(decode=DecodeSettings(quota_min_s=0.001, quota_max_s=0.005))
Checkpoint = Callable[[str], Path]


def prompt_of(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]


def slot(checkpoint: Checkpoint, *names: str, slabs: int = 16, **changes: Any) -> TorchEngine:
    """An arena for the weights of one of the models, and slabs of KV: 7 blocks of llama's, or 3 of starcoder2's."""
    make_stream, clock = changes.pop("make_copy_stream", None), changes.pop("clock", time.monotonic)
    given = {"kv_bytes": slabs * SLAB_BYTES, "block_tokens": BLOCK_TOKENS, "turns": QUICK, **changes}
    settings = slot_for_one([checkpoint(name) for name in names], **given)
    engine = TorchEngine(settings, clock, make_stream)
    for name in names:
        engine.load(name, spec_of(name, checkpoint(name)))
    return engine


def ask(name: str, prompt: Sequence[int], instance_id: str = "llama", **fields: Any) -> EngineRequest:
    return request(name, prompt, **{"instance_id": instance_id, "max_tokens": 6, "ignore_eos": True, **fields})


def answer(engine: TorchEngine, *asked: EngineRequest) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """The tokens of requests that are asked at once, and how many tokens of their prompts were cached."""
    for one in asked:
        engine.add(one)
    gathered, outputs = Gathered(), list[EngineOutput]()
    for step in steps_of(engine):
        gathered.take(step)
        outputs += step
    assert gathered.errors == {}
    cached = {one.request_id: [o.cached_tokens for o in outputs if o.request_id == one.request_id] for one in asked}
    assert all(not any(tokens[1:]) for tokens in cached.values()), "only the first token's output tells"
    return gathered.tokens, {name: tokens[0] for name, tokens in cached.items()}


def steps_of(engine: TorchEngine) -> Iterator[Sequence[EngineOutput]]:
    for number in range(50_000):
        if not engine.has_work():
            engine.check()
            return
        yield stepped(engine)
        if number % 5 == 0:
            engine.check()
    raise AssertionError("never done")


def full_blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_conversation_makes_the_tokens_it_makes_without_a_cache_and_finds_its_answers_too(
    architecture: str, checkpoint: Checkpoint
) -> None:
    folder = checkpoint(architecture)
    with closing(slot(checkpoint, architecture, slabs=64, prefill_tokens_per_step_max=7)) as engine:
        said, known = prompt_of(1, 30), 0
        for turn in range(3):
            asked = ask("talk", said, architecture, ignore_eos=False, seed=3)
            engine.add(ask(f"other-{turn}", prompt_of(9 + turn, 13), architecture))
            made, cached = answer(engine, asked)
            assert made["talk"] == greedy_tokens(folder, said, 6)
            assert made[f"other-{turn}"] == alone(checkpoint, ask("o", prompt_of(9 + turn, 13), architecture))
            assert cached["talk"] == full_blocks(known)
            cut_off = len(made["talk"]) == asked.max_tokens  # then nothing was computed after the last token
            known = len(said) + len(made["talk"]) - cut_off
            said = [*said, *made["talk"], *prompt_of(20 + turn, 11)]


_alone: dict[EngineRequest, tuple[int, ...]] = {}


def alone(checkpoint: Checkpoint, asked: EngineRequest) -> tuple[int, ...]:
    """The request's tokens in an engine of its own, without a cache."""
    if asked not in _alone:
        with closing(slot(checkpoint, asked.instance_id, slabs=64, prefix_cache=False)) as engine:
            engine.add(asked)
            _alone[asked] = drain(engine).tokens[asked.request_id]
    return _alone[asked]


def test_seeded_answers_and_continued_ones_are_the_same(checkpoint: Checkpoint) -> None:
    asked = ask("one", prompt_of(1, 21), temperature=1.3, seed=11, max_tokens=12)
    expected = alone(checkpoint, asked)
    with closing(slot(checkpoint, "llama")) as engine:
        assert answer(engine, asked)[0]["one"] == expected
        made, cached = answer(engine, asked)
        assert (made["one"], cached["one"]) == (expected, 20)
        continued = ask("two", asked.prompt, temperature=1.3, seed=11, max_tokens=12, generated=expected[:7])
        made, cached = answer(engine, continued)
        assert made["two"] == expected[7:]
        assert cached["two"] == 21, "of the prompt, though 24 tokens were cached"


def test_a_whole_prompt_in_the_cache_leaves_a_token_to_compute(checkpoint: Checkpoint) -> None:
    asked = ask("one", prompt_of(1, 16))
    with closing(slot(checkpoint, "llama")) as engine:
        first = answer(engine, asked)
        assert answer(engine, asked) == (first[0], {"one": 12})


def test_only_the_same_salt_and_the_same_model_share(checkpoint: Checkpoint, tmp_path: Path) -> None:
    prompt = prompt_of(1, 20)
    with closing(slot(checkpoint, "llama", slabs=32)) as engine:
        engine.load("twin", spec_of("twin", checkpoint("llama")))
        seen = [
            answer(engine, ask("r", prompt, **fields))[1]["r"]
            for fields in (
                {"cache_salt": "tenant"},
                {"cache_salt": "other"},
                {},
                {"instance_id": "twin"},
                {"cache_salt": "tenant"},
                {},
                {"instance_id": "twin"},
            )
        ]
        assert seen == [0, 0, 0, 0, 16, 16, 16]
        engine.unload("llama")
        engine.load("llama", spec_of("llama", save_tiny("llama", tmp_path / "other", seed=5)))
        made, cached = answer(engine, ask("r", prompt, ignore_eos=False))
        assert (made["r"], cached["r"]) == (greedy_tokens(tmp_path / "other", prompt, 6), 0)


def test_without_the_setting_nothing_is_kept(checkpoint: Checkpoint) -> None:
    with closing(slot(checkpoint, "llama", prefix_cache=False)) as engine:
        for _ in range(2):
            assert answer(engine, ask("r", prompt_of(1, 20)))[1] == {"r": 0}
        assert engine.arena.kv_slabs == 0
        assert engine.stats().prefix_hit_tokens == {"llama": 0}


def test_requests_that_come_together_compute_their_prefix_once(checkpoint: Checkpoint) -> None:
    shared = prompt_of(1, 40)
    asked = [ask(f"r{number}", [*shared, *prompt_of(2 + number, 3)]) for number in range(4)]
    with closing(slot(checkpoint, "llama", prefill_tokens_per_step_max=16)) as engine:
        made, cached = answer(engine, *asked)
        assert made == {one.request_id: alone(checkpoint, one) for one in asked}
        assert sorted(cached.values()) == [0, 40, 40, 40]
        stats = engine.stats()
        assert stats.prefix_query_tokens == {"llama": 4 * 43}
        assert stats.prefix_hit_tokens == {"llama": 120}


def test_none_waits_for_a_prompt_that_is_much_longer_than_what_it_shares(checkpoint: Checkpoint) -> None:
    shared = prompt_of(1, 16)
    with closing(slot(checkpoint, "llama", slabs=32, prefill_tokens_per_step_max=24)) as engine:
        long, short = ask("long", [*shared, *prompt_of(2, 200)]), ask("short", [*shared, 5], tier="IW-F")
        engine.add(long)
        engine.step()
        made, cached = answer(engine, short)
        assert list(made) == ["short", "long"], "the short one answered first"
        assert cached == {"short": 0}
        assert made == {one.request_id: alone(checkpoint, one) for one in (short, long)}


def test_one_that_waits_for_anothers_prefix_goes_on_if_that_leaves(checkpoint: Checkpoint) -> None:
    shared = prompt_of(1, 40)
    with closing(slot(checkpoint, "llama", prefill_tokens_per_step_max=16)) as engine:
        engine.add(ask("leaves", shared))
        engine.add(ask("stays", [*shared, 5]))
        engine.step()
        engine.step()
        engine.cancel("leaves")
        assert drain(engine).tokens == {"stays": alone(checkpoint, ask("stays", [*shared, 5]))}
        engine.check()


@pytest.mark.parametrize("time_slices", get_args(TimeSlices))
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_prefix_that_a_less_urgent_prompt_computes_is_computed_first_however_many_others_come(
    seed: int, mixed: bool, time_slices: TimeSlices, checkpoint: Checkpoint
) -> None:
    """As many tokens as a step prefills arrive with each step, before the less urgent prompt in the order of service.
    A third prompt may wait for the same prefix.
    """
    chance, step_tokens = random.Random(seed), 16
    first, others = chance.choice([("NIW", "IW-N"), ("NIW", "IW-F"), ("IW-N", "IW-F")])
    shared = prompt_of(seed, chance.randrange(60, 160))
    long = ask("long", [*shared, *prompt_of(seed + 100, chance.randrange(60))], tier=first)
    urgent = ask("urgent", [*shared, *prompt_of(seed + 200, chance.randrange(1, 30))], tier="IW-F")
    turns = replace_fields(QUICK, mixed_batches=mixed, time_slices=time_slices)
    changes = {"clock": Ticks(), "turns": turns, "prefill_tokens_per_step_max": step_tokens}
    with closing(slot(checkpoint, "llama", slabs=128, **changes)) as engine:
        engine.add(long)
        for _ in range(chance.randint(1, 3)):
            engine.step()
        if chance.random() < 0.5:
            engine.add(ask("third", [*shared, *prompt_of(seed + 300, 20)], tier=others))
        engine.add(urgent)
        gathered, needed = Gathered(), -(-len(long.prompt) // step_tokens) + -(-len(urgent.prompt) // step_tokens)
        for number in range(needed):
            prompt = prompt_of(1000 + number, step_tokens)
            engine.add(ask(f"other-{number}", prompt, tier=others, max_tokens=chance.randint(1, 3)))
            gathered.take(engine.step())
        assert gathered.tokens.get("urgent"), f"no token in {needed} steps"
        gathered.take([output for step in steps_of(engine) for output in step])
        for one in (long, urgent):
            assert gathered.tokens[one.request_id] == alone(checkpoint, one)


def test_keys_and_values_that_are_not_numbers_reach_nobody_else(checkpoint: Checkpoint) -> None:
    asked = ask("r", [*prompt_of(1, 10), 50, *prompt_of(2, 20)])
    with closing(slot(checkpoint, "llama")) as engine:
        answer(engine, ask("warm", prompt_of(3, 5)))
        model: Any = engine.models["llama"].weights.skeleton.model
        row = model.get_input_embeddings().weight[50]
        healthy = row.clone()
        row[:] = float("nan")
        engine.add(asked)
        assert "not numbers" in drain(engine).errors["r"]
        row[:] = healthy
        assert answer(engine, asked) == ({"r": alone(checkpoint, asked)}, {"r": 0})


def test_a_prefill_worker_caches_what_it_exports(checkpoint: Checkpoint, tmp_path: Path) -> None:
    asked = ask("r", prompt_of(1, 41))
    changes = {"host_kv_bytes": 8 * SLAB_BYTES, "host_kv_file": tmp_path / "kv", "prefill_only": True}
    with closing(slot(checkpoint, "llama", **changes)) as prefills, closing(slot(checkpoint, "llama")) as decodes:
        seen = []
        for number in range(12):  # more than its host memory holds, if what was exported stayed
            one = ask(f"r{number}", asked.prompt)
            prefills.add(one)
            outputs = [output for step in steps_of(prefills) for output in step]
            (first, exported) = outputs
            seen.append(first.cached_tokens)
            decodes.add(ask(f"r{number}", asked.prompt, generated=first.token_ids, kv=exported.kv))
            rest = drain(decodes).tokens[f"r{number}"]
            assert (*first.token_ids, *rest) == alone(checkpoint, asked)
            prefills.release(f"r{number}")
            prefills.check()
        assert seen == [0] + [40] * 11
        assert decodes.stats().prefix_query_tokens == {}, "no prefill, no query"


def test_a_cache_is_no_use_of_memory(checkpoint: Checkpoint) -> None:
    with closing(slot(checkpoint, "llama")) as engine:
        empty = engine.stats().instances[0]
        for number in range(6):
            answer(engine, ask("r", prompt_of(number, 30)))
        full = engine.stats()
        assert replace(full.instances[0], prefill_s=None, decode_s=None) == empty
        assert full.pool is not None
        assert (full.pool.slabs["kv"], full.pool.slabs["cached"]) == (0, engine.arena.kv_slabs)
        assert full.pool.kv[0].cached_bytes > 0
        assert full.pool.kv[0].used_bytes == 0


def test_sequences_that_share_blocks_use_them_once(checkpoint: Checkpoint) -> None:
    shared = prompt_of(1, 40)
    asked = [ask(f"r{number}", [*shared, 5 + number], max_tokens=30) for number in range(3)]
    with closing(slot(checkpoint, "llama")) as engine:
        engine.add(asked[0])
        alone_bytes = 0
        for _ in range(4):
            engine.step()
            alone_bytes = engine.stats().instances[0].kv_used_bytes
        for one in asked[1:]:
            engine.add(one)
        for _ in range(6):
            engine.step()
        used = engine.stats().instances[0]
        assert used.running == 3
        assert alone_bytes < used.kv_used_bytes < 2 * alone_bytes
        drain(engine)


@pytest.mark.parametrize("host_slabs", [0, 3, 32])
def test_what_is_evicted_comes_back_from_host_memory_as_far_as_that_has_room(
    host_slabs: int, checkpoint: Checkpoint
) -> None:
    """Six conversations take turns in memory for one and a half of them."""
    talks = {f"talk-{number}": prompt_of(number, 50) for number in range(6)}
    with closing(slot(checkpoint, "llama", slabs=2, host_kv_bytes=host_slabs * SLAB_BYTES)) as engine:
        seen: list[int] = []
        for _ in range(2):
            for name, said in talks.items():
                made, cached = answer(engine, ask(name, said))
                assert made[name] == alone(checkpoint, ask(name, said))
                seen.append(cached[name])
        assert seen[:6] == [0] * 6
        assert engine.stats().extra["preemptions"] == 0, "no request makes way for a cache"
        if host_slabs == 32:
            assert seen[6:] == [48] * 6
        elif host_slabs == 0:
            assert seen[6:] == [0] * 6


def test_a_prefix_lives_through_switches_of_models(checkpoint: Checkpoint) -> None:
    names = ("llama", "qwen3", "starcoder2")  # the last has blocks of another shape
    with closing(slot(checkpoint, *names, slabs=6, host_kv_bytes=64 * SLAB_BYTES)) as engine:
        for turn in range(3):
            for name in names:
                made, cached = answer(engine, ask(name, prompt_of(1, 50), name))
                assert made[name] == alone(checkpoint, ask(name, prompt_of(1, 50), name))
                assert cached[name] == (48 if turn else 0)
        assert engine.stats().switches_total >= 8


def test_one_models_cache_keeps_no_slabs_from_another_shape(checkpoint: Checkpoint) -> None:
    with closing(slot(checkpoint, "llama", "starcoder2", slabs=4)) as engine:
        for number in range(8):
            answer(engine, ask("r", prompt_of(number, 40)))
        largest = engine.stats().instances[1].kv_tokens_max
        asked = ask("large", prompt_of(1, largest - 6), "starcoder2")
        assert answer(engine, asked)[0]["large"] == alone(checkpoint, asked)
        assert engine.stats().extra["preemptions"] == 0


@pytest.mark.parametrize(
    ("kv_pressure", "mixed"), [("swap", False), ("recompute", False), ("remap", False), ("swap", True)]
)
def test_under_kv_pressure_shared_blocks_stay_right(kv_pressure: str, checkpoint: Checkpoint, *, mixed: bool) -> None:
    names = ("llama", "mistral", "starcoder2")
    shared = prompt_of(1, 25)
    asked = [
        ask(f"{name}-{number}", [*shared, *prompt_of(number + 2, 3 * number)], name, max_tokens=12)
        for number in range(4)
        for name in names
    ]
    expected = {one.request_id: alone(checkpoint, one) for one in asked}
    turns = TurnSettings(decode=QUICK.decode, mixed_batches=mixed)
    engine = slot(checkpoint, *names, slabs=5, host_kv_bytes=8 * SLAB_BYTES, kv_pressure=kv_pressure, turns=turns)
    with closing(engine):
        for _ in range(2):
            assert answer(engine, *asked)[0] == expected
        assert engine.stats().extra["preemptions"] > 0
        assert sum(engine.stats().prefix_hit_tokens.values()) > 0


@pytest.mark.parametrize("seed", range(3))
def test_failing_and_late_transfers_change_no_token(seed: int, checkpoint: Checkpoint) -> None:
    streams: list[FaultyStream] = []

    def faulty(name: str) -> FaultyStream:
        inners = [ThreadStream(f"{name}-{number}") for number in range(2)]
        streams.append(FaultyStream(inners, random.Random(f"{seed} {name}"), delay_s=0.003, fail_share=0.3))
        return streams[-1]

    names = ("llama", "starcoder2")
    chance = random.Random(seed)
    asked = [
        ask(f"r{number}", [*prompt_of(number % 4, 30), *prompt_of(number, 5)], chance.choice(names))
        for number in range(16)
    ]
    expected = {one.request_id: alone(checkpoint, one) for one in asked}
    with closing(slot(checkpoint, *names, slabs=5, host_kv_bytes=2**19, make_copy_stream=faulty)) as engine:
        gathered, left = Gathered(), list(asked)
        for step in range(100_000):
            if left and step % 3 == 0:
                engine.add(left.pop())
            if step == 40:
                engine.add(ask("leaves", [*prompt_of(2, 30), 7]))
            if step == 44:
                engine.cancel("leaves")
            gathered.take(engine.step())
            if step % 5 == 0:
                engine.check()
            if not left and not engine.has_work():
                break
        gathered.tokens.pop("leaves", None)
        assert gathered.errors == {}
        assert gathered.tokens == expected
        assert sum(stream.failed for stream in streams) > 0
