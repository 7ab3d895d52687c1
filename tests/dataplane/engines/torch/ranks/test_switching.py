"""Models that take turns on slots of two ranks, with preemption, offloaded layers, cached prefixes, too little host
memory and transfers that are late or fail: the tokens are those of one rank. What fails on the other one ends the slot.
"""

import errno
import gc
import mmap
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.copies.cpu import ThreadStream
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.model.parallel import Rank, Unconnected
from dataplane.engines.torch.model.skeleton import build_skeleton
from dataplane.engines.torch.ranks import follower
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.memory.events import TransferError
from dataplane.memory.model_cache import HostMemoryError, ModelCache
from dataplane.protocol.errors import DeviceLostError
from dataplane.scheduling.deadlines import TimeSlices
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.torch.deep import Deep, Ticks, Undisturbed, loaded, pool_of, run_dry, slot, wants
from tests.dataplane.engines.torch.drive import Gathered, drain, interleave, request
from tests.dataplane.engines.torch.faults import FaultyStream
from tests.dataplane.engines.torch.rank_engines import engine_of
from tests.dataplane.engines.torch.rank_threads import start_threads
from tests.dataplane.engines.torch.slots import slot_for_one
from tests.dataplane.engines.torch.tiny import VOCABULARY, greedy_tokens, spec_of

NAMES = ("llama", "qwen3_moe", "gemma2")
SLAB_BYTES = 4608
QUOTA = DecodeSettings(quota_max_s=0.01, quota_min_s=0.01)
Checkpoint = Callable[[str], Path]


def settings(
    folders: dict[str, Path], cache: Path, ranks: int, turns: TurnSettings | None = None, **changes: Any
) -> TorchEngineSettings:
    """Weights of one model, and KV of two requests or less."""
    return slot_for_one(
        folders.values(),
        **changes,
        ranks=ranks,
        cache_folder=cache,
        slab_bytes=SLAB_BYTES * 2 // ranks,
        kv_bytes=7 * SLAB_BYTES * 2 // ranks,
        host_kv_bytes=2**21,
        block_tokens=8,
        prefill_tokens_per_step_max=16,
        batch_max=4,
        kv_pressure="swap",
        turns=turns or TurnSettings(decode=QUOTA),
    )


def requests_of(name: str, temperature: float) -> list[EngineRequest]:
    chance = random.Random(name)
    return [
        request(
            f"{name}-{number}",
            [chance.randrange(3, VOCABULARY) for _ in range(length)],
            instance_id=name,
            max_tokens=6,
            temperature=temperature,
            seed=number,
            ignore_eos=True,
        )
        for number, length in enumerate((30, 7, 18))
    ]


def interleaved(engine: TorchEngine, folders: dict[str, Path], temperature: float) -> Gathered:
    """All requests, joining in any order; one more of each model leaves after its first tokens."""
    for name, folder in folders.items():
        engine.load(name, spec_of(name, folder))
    joining = [one for name in folders for one in requests_of(name, temperature)]
    joining += [request(f"leaves-{name}", range(3, 33), instance_id=name, max_tokens=20) for name in folders]
    gathered = interleave(engine, joining)
    engine.check()
    return gathered


def host_bytes(folder: Path) -> int:
    """The host copy of a model for two ranks."""
    rank = Rank(index=0, count=2, collectives=Unconnected())
    return 2 * build_skeleton(folder, torch.float32, torch.device("cpu"), rank=rank).size_bytes


@pytest.mark.parametrize(
    ("time_slices", "mixed", "temperature"),
    [
        ("rounds", False, 0.0),
        ("deadlines", False, 0.0),
        ("deadlines", True, 1.0),
        pytest.param("rounds", True, 0.0, marks=pytest.mark.slow),
        pytest.param("rounds", False, 1.0, marks=pytest.mark.slow),
        pytest.param("deadlines", True, 0.0, marks=pytest.mark.slow),
        pytest.param("deadlines", False, 1.0, marks=pytest.mark.slow),
    ],
)
def test_models_take_turns_in_memory_for_one_over_faulty_transfers(
    time_slices: TimeSlices,
    mixed: bool,
    temperature: float,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host memory is for all of them but one."""
    folders = {name: checkpoint(name) for name in NAMES}
    alone = TorchEngine(settings(folders, tmp_path / "alone", 1), Ticks())
    expected: dict[str, tuple[int, ...]] = {}
    for name, folder in folders.items():
        alone.load(name, spec_of(name, folder))
        for one in requests_of(name, temperature):
            alone.add(one)
            expected |= drain(alone).tokens
        alone.unload(name)
    alone.close()

    streams: dict[str, FaultyStream] = {}

    def make(name: str) -> FaultyStream:
        """Transfers of rank 0 are late, out of order, and fail; those of the other rank are later."""
        inners = [ThreadStream(f"{name}-{number}") for number in range(2)]
        streams[name] = FaultyStream(inners, random.Random(f"2 {name}"), delay_s=0.002, fail_share=0.15)
        return streams[name]

    holds, hold = [0], follower.Follower._hold

    def counted(*given: Any) -> None:
        holds[0] += 1
        hold(*given)

    monkeypatch.setattr(follower.Follower, "_hold", counted)
    monkeypatch.setattr(
        follower,
        "make_stream",
        lambda _, name, **__: FaultyStream([ThreadStream(name)], random.Random(name), delay_s=0.004),
    )
    turns = TurnSettings(decode=QUOTA, time_slices=time_slices, mixed_batches=mixed)
    cache_bytes = sum(map(host_bytes, folders.values())) - 1
    given = settings(folders, tmp_path / "two", 2, turns, cache_bytes=cache_bytes)
    engine = TorchEngine(given, Ticks(), make, other_ranks=start_threads(1))
    gathered = interleaved(engine, folders, temperature)
    stats = engine.stats()
    engine.close()
    assert gathered.errors == {}
    assert {name: made for name, made in gathered.tokens.items() if not name.startswith("leaves-")} == expected
    if time_slices == "rounds" and not mixed:
        assert stats.switches_total >= 2 * len(NAMES)
        assert stats.extra["swapped_in"] >= 1
    assert streams["weights"].failed > 0, "a forward pass was aborted before one of its shards"
    assert holds[0] >= len(NAMES), "the last one was held after another was evicted"
    assert stats.pool is not None
    assert (sum(one.prompts for one in stats.pool.time_slices if one.kind == "mixed") > 0) is mixed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", ["transfer", "full host"])
def test_what_fails_on_the_other_rank_ends_the_slot(
    fault: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its models goes on with memory that one rank does not have. The agent starts another worker process."""

    def fail(*_: Any) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def broken(_: Any, name: str, **__: Any) -> FaultyStream:
        share = float(name == "weights")
        return FaultyStream([ThreadStream(name)], random.Random(name), fail_share=share, fails_in_a_row_max=1)

    folders = {name: checkpoint(name) for name in ("llama", "gemma2")}
    if fault == "transfer":
        monkeypatch.setattr(follower, "make_stream", broken)
    engine = TorchEngine(settings(folders, tmp_path, 2), Ticks(), other_ranks=start_threads(1))
    engine.load("llama", spec_of("llama", folders["llama"]))
    if fault == "full host":
        monkeypatch.setattr(follower, "mapped", fail)

    def go_on() -> None:
        engine.load("gemma2", spec_of("gemma2", folders["gemma2"]))
        for name in folders:
            engine.add(request(name, range(3, 33), instance_id=name, max_tokens=20))
        drain(engine, steps_max=10**6)

    with pytest.raises(DeviceLostError):
        go_on()
    with pytest.raises(TransferError if fault == "transfer" else OSError):  # of that rank
        engine.close()
    gc.collect()  # a socket that stays open is a warning, which fails this test


def test_a_rank_that_is_gone_when_weights_are_read_again_ends_the_slot(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that model alone."""

    def lost(_: Any) -> bool:
        raise DeviceLostError("rank 1 does not read its commands")

    folder = checkpoint("llama")
    engine = TorchEngine(settings({"llama": folder}, tmp_path, 1), Ticks())
    engine.load("llama", spec_of("llama", folder))
    engine.add(request("r", (5, 9), instance_id="llama"))
    monkeypatch.setattr(engine.host_models, "ready", lost)
    with pytest.raises(DeviceLostError):
        drain(engine)
    engine.close()


def test_layers_are_offloaded_on_both_ranks(deep: Deep, undisturbed: Undisturbed, tmp_path: Path) -> None:
    requests = wants(["llama"], 8)
    expected = undisturbed(requests)
    given = slot(deep, ["llama"], models_there=1, slab_bytes=2**12, ranks=2, cache_folder=tmp_path)
    engine = loaded(deep, ["llama"], given)
    for wanted in requests:
        engine.add(wanted)
    gathered = Gathered()
    most = run_dry(engine, gathered)
    engine.step()  # whose idle steps reclaim what is left
    moved = pool_of(engine).layers_moved
    engine.close()
    assert gathered.tokens == expected
    assert most >= 2, "several layers deep"
    assert moved["offloaded"] == moved["reclaimed"] >= most


def test_a_cached_prefix_outlives_a_switch_on_both_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folders = {name: checkpoint(name) for name in ("llama", "gemma2")}
    engine = TorchEngine(settings(folders, tmp_path, 2), Ticks(), other_ranks=start_threads(1))
    for name, folder in folders.items():
        engine.load(name, spec_of(name, folder))
    prompt = list(range(3, 43))
    made = []
    for number, name in enumerate(("llama", "gemma2", "llama")):
        engine.add(request(f"r{number}", prompt, instance_id=name, max_tokens=6, ignore_eos=True))
        made.append(drain(engine).tokens[f"r{number}"])
    hits = engine.stats().prefix_hit_tokens
    engine.close()
    assert hits["llama"] == 32
    assert made[0] == made[2]


def test_a_host_copy_is_not_evicted_before_all_ranks_have_mapped_it(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is in the node's cache already, so that rank 0 has it while the other rank still builds the model. Then
    another worker of the node requests space.
    """
    spec = spec_of("a", checkpoint("llama"))
    before = engine_of(2, tmp_path)
    before.prepare(spec)
    size_bytes = before.host_models.cache_bytes
    before.close()
    build, may_build = follower.build_skeleton, threading.Event()

    def build_later(*given: Any) -> Any:
        assert may_build.wait(60)
        return build(*given)

    monkeypatch.setattr(follower, "build_skeleton", build_later)
    engine = engine_of(2, tmp_path)
    engine.prepare(spec)
    (tmp_path / "room-wanted").write_text("1")  # the process of the other worker
    engine.step()
    with pytest.raises(HostMemoryError, match="llama"):
        ModelCache(tmp_path, size_bytes).acquire("other", size_bytes, lambda _: None)
    may_build.set()
    engine.load("a", spec)
    engine.add(request("r", (5, 9, 33)))
    tokens = drain(engine).tokens
    engine.close()
    assert tokens == {"r": greedy_tokens(checkpoint("llama"), (5, 9, 33), 8)}
