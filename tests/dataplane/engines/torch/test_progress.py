"""Slots drawn by chance with too little memory for what they are asked: every request ends, with its own tokens.

What is decided hangs on the seed, not on the machine's threads: the clock ticks with each look, and copies pass after
so many polls (`polled.py`).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from dataplane.engines.core.pressure import KvPressure
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.deadlines import TimeSlices
from tests.dataplane.engines.torch.deep import EAGER, QUICK, Deep, Undisturbed, loaded, slot
from tests.dataplane.engines.torch.drive import Gathered, request
from tests.dataplane.engines.torch.handing import Handing
from tests.dataplane.engines.torch.polled import PolledStream
from tests.dataplane.engines.torch.tiny import VOCABULARY

QUIET_STEPS_MAX = 5000
"""So many steps without a token are a livelock; a stall that ends by a share of the time or a deadline is shorter."""
SEEDS = [0, 1, 29, 1053, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 28))]


class Chance:
    """What is drawn for one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.names = self.draw.sample(("llama", "qwen2", "gemma3_text", "mistral"), self.draw.randint(1, 3))
        self.polls_max = self.draw.choice((0, 2, 10, 40))
        self.fail_share = self.draw.choice((0.0, 0.0, 0.1))
        self.common = {
            "models_there": self.draw.choice((1, 1, 2)),
            "turns": replace(
                QUICK,
                mixed_batches=self.draw.random() < 0.6,
                time_slices=self.draw.choice(get_args(TimeSlices)),
            ),
            "prefix_cache": self.draw.random() < 0.8,
            "prefill_tokens_per_step_max": self.draw.choice((8, 16, 2048)),
            "host_link_bytes_per_s": self.draw.choice((1e6, 1e8, 1e11)),
        }

    def engine(self, deep: Deep, name: str, **changes: Any) -> TorchEngine:
        pressure: KvPressure = self.draw.choice(get_args(KvPressure))
        eager = pressure == "remap" or self.draw.random() < 0.3
        given = {**self.common, "kv_pressure": pressure, "remap": EAGER if eager else RemapSettings(), **changes}

        def stream(stream_name: str) -> PolledStream:
            draw = random.Random(f"{self.seed} {name} {stream_name}")
            return PolledStream(draw, polls_max=self.polls_max, fail_share=self.fail_share)

        return loaded(deep, self.names, slot(deep, self.names, **given), stream)

    def requests(self, *engines: TorchEngine) -> list[EngineRequest]:
        """Some that begin alike, each as long as one request may be on all the engines."""
        longest = min(one.kv_tokens_max for engine in engines for one in engine.stats().instances)
        shared = self.draw.choices(range(3, VOCABULARY), k=16)
        asked = []
        for number in range(self.draw.choice((3, 6, 10))):
            max_tokens = self.draw.choice((2, 6, 12))
            own = self.draw.choices(range(3, VOCABULARY), k=longest)
            prompt = [*shared[: self.draw.randint(0, 16)], *own][: self.draw.randrange(2, longest - max_tokens)]
            asked.append(
                request(
                    f"r{number}",
                    prompt,
                    instance_id=self.draw.choice(self.names),
                    max_tokens=max_tokens,
                    tier=self.draw.choice(list(Tier)),
                )
            )
        return asked


def run(
    asked: Sequence[EngineRequest], chance: Chance, step: Callable[[list[EngineRequest]], bool], got: Gathered
) -> None:
    """Step until that is False; fails if no token is made for long. `step` gets those that join."""
    joining, quiet, before = list(asked), 0, 0
    while step([joining.pop()] if joining and chance.draw.random() < 0.3 else []) or joining:
        made = sum(map(len, got.tokens.values()))
        quiet, before = (0 if made > before else quiet + 1), made
        assert quiet < QUIET_STEPS_MAX, f"no token for {quiet} steps"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slot_serves_all_to_their_ends(seed: int, deep: Deep, undisturbed: Undisturbed) -> None:
    chance = Chance(seed)
    engine = chance.engine(deep, "slot", host_kv_bytes=chance.draw.choice((0, 2**14, 2**16, 2**22)))
    asked, gathered = chance.requests(engine), Gathered()

    def step(joining: list[EngineRequest]) -> bool:
        for one in joining:
            engine.add(one)
        gathered.take(engine.step())
        return engine.has_work()

    run(asked, chance, step, gathered)
    assert gathered.tokens == undisturbed(asked)
    engine.check()
    engine.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_two_slots_that_hand_over_serve_all_to_their_ends(
    seed: int, deep: Deep, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    chance = Chance(seed)
    host_bytes = chance.draw.choice((13 * 2**13, 2**18, 2**22))
    exports = {"prefill_only": True, "host_kv_file": tmp_path / "kv", "kv_events": "off", "host_kv_bytes": host_bytes}
    prefiller = chance.engine(deep, "prefiller", **exports)
    decoder = chance.engine(deep, "decoder", host_kv_bytes=chance.draw.choice((0, 2**14, 2**16, 2**22)))
    asked = chance.requests(prefiller, decoder)
    handing = Handing(wanted={one.request_id: one for one in asked}, decoder=decoder, release=prefiller.release)

    def step(joining: list[EngineRequest]) -> bool:
        for one in joining:
            prefiller.add(one)
        handing.prefilled(prefiller.step())
        handing.decode()
        return not handing.over or prefiller.has_work()

    run(asked, chance, step, handing.gathered)
    assert handing.gathered.tokens == undisturbed(asked)
    for engine in (prefiller, decoder):
        engine.check()
        engine.close()


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def polled(name: str) -> PolledStream:
    return PolledStream(random.Random(f"1 {name}"), polls_max=2)


def test_a_batch_that_makes_room_for_its_kv_keeps_its_turn_until_it_is_there(deep: Deep) -> None:
    """One model's request waits in host memory while others of another model come without end."""
    turns = replace(QUICK, burst_s=0.0008)
    names = ("llama", "qwen2")
    changes = {"kv_pressure": "swap", "turns": turns, "prefix_cache": False, "prefill_tokens_per_step_max": 4}
    engine = loaded(deep, names, slot(deep, names, models_there=2, host_link_bytes_per_s=1e8, **changes), polled)
    engine.add(request("waits", prompt_of(1, 20), instance_id="llama", max_tokens=24, tier="IW-N", ignore_eos=True))
    gathered, others = Gathered(), 0
    while "waits" not in gathered.finished:
        if len(gathered.tokens.get("waits", ())) >= 2 and len(gathered.finished) == others:
            others += 1
            prompt = prompt_of(100 + others, 24)
            other = request(f"other-{others}", prompt, instance_id="qwen2", max_tokens=20, tier="IW-F", ignore_eos=True)
            engine.add(other)
        gathered.take(engine.step())
        assert others < 10, "it makes a token in each of its turns"
    engine.close()


@pytest.mark.parametrize("tokens", [1, 4])
def test_by_deadlines_prompts_longer_than_a_slice_do_not_make_each_other_start_over(deep: Deep, tokens: int) -> None:
    """Each needs most of the KV memory, and the answer of a third model is in host memory."""
    names = ("llama", "qwen2", "mistral")
    changes = {"kv_pressure": "swap", "turns": replace(QUICK, time_slices="deadlines"), "prefix_cache": False}
    settings = slot(
        deep, names, models_there=3, host_link_bytes_per_s=1e11, prefill_tokens_per_step_max=tokens, **changes
    )
    engine, gathered = loaded(deep, names, settings, polled), Gathered()
    engine.add(request("answer", prompt_of(1, 28), instance_id="mistral", max_tokens=16, tier="NIW", ignore_eos=True))
    while not gathered.tokens:
        gathered.take(engine.step())
    for number, name in enumerate(names[:2]):
        prompt = prompt_of(number, 40)
        engine.add(request(name, prompt, instance_id=name, max_tokens=4, tier="IW-N", ignore_eos=True))
        engine.step()
    for _ in range(2000):
        gathered.take(engine.step())
    assert set(gathered.finished) == {"answer", "llama", "qwen2"}
    engine.close()
