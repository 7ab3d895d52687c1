"""Sixteen architectures on slots too small for any two of them, with transfers that are late, reordered and failing:
each makes the tokens it makes when nothing disturbs it, on one slot, and on two of which one prefills for the other.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.copies.cpu import ThreadStream
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.scheduling.deadlines import TimeSlices
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.torch.drive import Gathered, drain, interleave, request
from tests.dataplane.engines.torch.fake_streams import FakeEvents
from tests.dataplane.engines.torch.faults import FaultyStream
from tests.dataplane.engines.torch.handing import DELAY_S, Handing, Streams
from tests.dataplane.engines.torch.slots import slot_for_one
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, VOCABULARY, greedy_tokens, spec_of

MAX_TOKENS = 6
PROMPT_TOKENS = (30, 7)
SLAB_BYTES = 9216  # one block of the largest KV shape in float32, two or three of the others
BLOCK_TOKENS = 8
KV_SLABS = 7  # a request of 36 tokens takes up to 5 of them
QUOTA_S = 0.02
Checkpoint = Callable[[str], Path]
Dtype = Literal["float32", "bfloat16"]


def slot(folders: dict[str, Path], dtype: Dtype, time_slices: TimeSlices, **changes: Any) -> TorchEngineSettings:
    return slot_for_one(
        folders.values(),
        **changes,
        dtype=dtype,
        slab_bytes=SLAB_BYTES,
        kv_bytes=KV_SLABS * SLAB_BYTES,
        host_kv_bytes=2**22,
        block_tokens=BLOCK_TOKENS,
        prefill_tokens_per_step_max=16,
        batch_max=4,
        turns=TurnSettings(decode=DecodeSettings(quota_max_s=QUOTA_S, quota_min_s=QUOTA_S), time_slices=time_slices),
    )


def ticking() -> Callable[[], float]:
    """A clock of its own: how many steps a turn has does not hang on the machine."""
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.001
        return now_s

    return clock


def prompts_of(architecture: str) -> list[list[int]]:
    chance = random.Random(architecture)
    return [[chance.randrange(3, VOCABULARY) for _ in range(tokens)] for tokens in PROMPT_TOKENS]


def requests_of(architecture: str) -> list[EngineRequest]:
    return [
        request(f"{architecture}-{number}", prompt, instance_id=architecture, max_tokens=MAX_TOKENS)
        for number, prompt in enumerate(prompts_of(architecture))
    ]


def undisturbed(folders: dict[str, Path], dtype: Dtype) -> dict[str, tuple[int, ...]]:
    """Tokens by request: a model at a time, a request at a time, over streams without faults."""
    engine = TorchEngine(slot(folders, dtype, "rounds"), ticking())
    tokens: dict[str, tuple[int, ...]] = {}
    for architecture, folder in folders.items():
        engine.load(architecture, spec_of(architecture, folder))
        for wanted in requests_of(architecture):
            engine.add(wanted)
            tokens |= drain(engine).tokens
        engine.unload(architecture)
    engine.close()
    return tokens


class Faults:
    """The faulty streams of an engine, by name."""

    def __init__(self, seed: int) -> None:
        self.streams: dict[str, FaultyStream] = {}
        self._seed = seed

    def make(self, name: str) -> FaultyStream:
        inners = [ThreadStream(f"{name}-{number}") for number in range(2)]
        chance = random.Random(f"{self._seed} {name}")
        self.streams[name] = FaultyStream(inners, chance, delay_s=0.002, fail_share=0.15)
        return self.streams[name]


def interleaved(
    folders: dict[str, Path], dtype: Dtype, faults: Faults, time_slices: TimeSlices
) -> tuple[Gathered, TorchEngine]:
    """All at once, joining in any order; one more of each model leaves after its first tokens."""
    engine = TorchEngine(slot(folders, dtype, time_slices), ticking(), faults.make)
    for architecture, folder in folders.items():
        engine.load(architecture, spec_of(architecture, folder))
    joining = [wanted for architecture in folders for wanted in requests_of(architecture)]
    joining += [request(f"leaves-{a}", prompts_of(a)[0], instance_id=a, max_tokens=20) for a in folders]
    return interleave(engine, joining), engine


@pytest.mark.parametrize("time_slices", get_args(TimeSlices))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sixteen_architectures_take_turns_in_memory_for_one(
    dtype: Dtype, time_slices: TimeSlices, checkpoint: Checkpoint
) -> None:
    folders = {architecture: checkpoint(architecture) for architecture in ARCHITECTURES}
    expected = undisturbed(folders, dtype)
    faults = Faults(seed=1)
    gathered, engine = interleaved(folders, dtype, faults, time_slices)

    assert gathered.errors == {}
    assert {name: made for name, made in gathered.tokens.items() if not name.startswith("leaves-")} == expected
    if dtype == "float32":
        for architecture, folder in folders.items():
            for number, prompt in enumerate(prompts_of(architecture)):
                assert expected[f"{architecture}-{number}"] == greedy_tokens(folder, prompt, MAX_TOKENS)

    stats = engine.stats()
    assert stats.switches_total >= 3 * len(folders)
    assert stats.extra["swapped_in"] >= len(folders)
    assert stats.pool is not None
    assert (stats.pool.slabs["kv"], stats.pool.slabs["moving"]) == (0, 0)
    assert all(faults.streams[name].failed > 0 for name in ("weights", "kv_in", "kv_out"))
    engine.close()


def handed_over(folders: dict[str, Path], tmp_path: Path, *, device: bool) -> tuple[Handing, TorchEngine, TorchEngine]:
    """All at once on a prefill slot, which announces KV to a decode slot while it transfers it."""
    events = [FakeEvents(tmp_path / name, random.Random(name), DELAY_S) if device else None for name in ("one", "two")]
    first = slot(folders, "float32", "deadlines", prefill_only=True, host_kv_file=tmp_path / "kv", kv_events="device")
    second = slot(folders, "float32", "deadlines")
    prefiller = TorchEngine(first, ticking(), Streams("first", device=device).make, events=events[0])
    decoder = TorchEngine(second, ticking(), Streams("second", device=device).make, events=events[1])
    for engine in (prefiller, decoder):
        for architecture, folder in folders.items():
            engine.load(architecture, spec_of(architecture, folder))
    joining = [wanted for architecture in folders for wanted in requests_of(architecture)]
    handing = Handing(wanted={one.request_id: one for one in joining}, decoder=decoder, release=prefiller.release)
    random.Random(0).shuffle(joining)
    while not handing.over or joining or prefiller.has_work():
        if joining:
            prefiller.add(joining.pop())
        handing.prefilled(prefiller.step())
        handing.decode()
    return handing, prefiller, decoder


@pytest.mark.parametrize("device", [True, False])
def test_sixteen_architectures_are_handed_over_while_their_kv_is_transferred(
    device: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folders = {architecture: checkpoint(architecture) for architecture in ARCHITECTURES}
    handing, prefiller, decoder = handed_over(folders, tmp_path, device=device)
    assert handing.gathered.errors == {}
    for one in handing.wanted.values():
        expected = greedy_tokens(folders[one.instance_id], one.prompt, MAX_TOKENS)
        assert handing.gathered.tokens[one.request_id] == expected
    assert handing.announced > len(folders)
    assert (decoder.kv.imports.waited_for["device"] > 0) is device
    for engine in (prefiller, decoder):
        engine.check()
        engine.close()
