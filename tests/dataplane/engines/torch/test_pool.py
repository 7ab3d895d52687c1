"""The pool: models and KV come and go, and no token shows it."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.copies.cpu import ThreadStream
from dataplane.engines.torch.engine import TorchEngine
from dataplane.memory.events import Event
from dataplane.protocol.errors import ContextLengthError
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.torch.drive import Gathered, drain, request
from tests.dataplane.engines.torch.faults import FaultyStream
from tests.dataplane.engines.torch.slots import slot_for_one
from tests.dataplane.engines.torch.tiny import VOCABULARY, greedy_tokens, spec_of
from tests.flows.waiting import wait_until

Checkpoint = Callable[[str], Path]
NAMES = ("llama", "qwen3", "gemma3_text")
QUICK = TurnSettings(decode=DecodeSettings(quota_min_s=0.001, quota_max_s=0.005))
"""Turns of a few steps."""


def prompt_of(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]


def pool(checkpoint: Checkpoint, names: Sequence[str] = NAMES, **changes: Any) -> TorchEngine:
    """A slot whose arena holds one of the models, and eight slabs of KV."""
    make_stream = changes.pop("make_copy_stream", None)
    settings = slot_for_one(
        [checkpoint(name) for name in names], **{"kv_bytes": 8 * 2**14, "block_tokens": 4, "turns": QUICK, **changes}
    )
    engine = TorchEngine(settings, time.monotonic, make_stream)
    for name in names:
        engine.load(name, spec_of(name, checkpoint(name)))
    return engine


def wants(names: Sequence[str], each: int, max_tokens: int = 10) -> list[EngineRequest]:
    return [
        request(f"{name}-{number}", prompt_of(number, 5 + 7 * number), instance_id=name, max_tokens=max_tokens)
        for number in range(each)
        for name in names
    ]


def check_tokens(checkpoint: Checkpoint, requests: Sequence[EngineRequest], gathered: Gathered) -> None:
    assert gathered.errors == {}
    for wanted in requests:
        expected = greedy_tokens(checkpoint(wanted.instance_id), wanted.prompt, wanted.max_tokens)
        assert gathered.tokens[wanted.request_id] == expected, wanted.request_id


@pytest.mark.parametrize("host_slabs", [0, 1, 64])
def test_under_kv_pressure_requests_are_swapped_or_recomputed_with_the_same_tokens(
    checkpoint: Checkpoint, host_slabs: int
) -> None:
    engine = pool(checkpoint, host_kv_bytes=host_slabs * 2**14)
    requests = wants(NAMES, 4)
    for wanted in requests:
        engine.add(wanted)
    check_tokens(checkpoint, requests, drain(engine, steps_max=50_000))
    extra = engine.stats().extra
    assert extra["preemptions"] > 0
    assert (extra["recomputed"] == 0) is (host_slabs == 64)
    assert (extra["swapped_in"] > 0) is (host_slabs > 0)
    engine.check()
    assert [instance.kv_used_bytes for instance in engine.stats().instances] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_faulty_transfers_change_no_token(checkpoint: Checkpoint, seed: int) -> None:
    rng = random.Random(seed)
    streams: list[FaultyStream] = []

    def faulty(name: str) -> CopyStream:
        inners = [ThreadStream(f"{name}-{number}") for number in range(2)]
        streams.append(FaultyStream(inners, random.Random(rng.random()), delay_s=0.002, fail_share=0.2))
        return streams[-1]

    engine = pool(checkpoint, host_kv_bytes=2**20, make_copy_stream=faulty)
    requests = wants(NAMES, 4)
    for wanted in requests:
        engine.add(wanted)
    check_tokens(checkpoint, requests, drain(engine, steps_max=100_000))
    assert sum(stream.failed for stream in streams) > 0
    engine.check()
    engine.close()


class Gate:
    """Copies only as many submissions as it was let."""

    def __init__(self) -> None:
        self.open = threading.Semaphore(0)
        self._inner = ThreadStream("gated")

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        return self._inner.submit(copies, [*after, _Admitted(self.open)])

    def close(self) -> None:
        self._inner.close()


class _Admitted:
    error = None

    def __init__(self, open_: threading.Semaphore) -> None:
        self._open = open_

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._open.acquire()


def test_a_model_starts_while_its_later_layers_are_loaded(checkpoint: Checkpoint) -> None:
    gate = Gate()
    streams: dict[str, CopyStream] = {"weights": gate}
    engine = pool(checkpoint, ["llama"], make_copy_stream=lambda name: streams.get(name) or ThreadStream(name))
    layers = engine.models["llama"].weights.skeleton.model.get_decoder().layers  # type: ignore[operator]
    ran: list[int] = []
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    engine.add(request("r", prompt_of(1, 9), instance_id="llama"))
    gathered = Gathered()
    thread = threading.Thread(target=lambda: gathered.take(engine.step()))
    thread.start()
    for count in (0, 0, *range(1, len(layers) + 1)):  # the embedding comes first
        wait_until(lambda count=count: len(ran) >= count, f"{count} layers ran")  # type: ignore[misc]
        assert ran == list(range(count)), "none before it came"
        gate.open.release()
    thread.join()
    rest = drain(engine).tokens["r"]
    assert gathered.tokens["r"] + rest == greedy_tokens(checkpoint("llama"), prompt_of(1, 9), 8)


def test_the_next_model_comes_while_this_one_runs(checkpoint: Checkpoint) -> None:
    names = NAMES[:2]
    engine = pool(
        checkpoint, names, kv_bytes=2**21, turns=TurnSettings(decode=DecodeSettings(quota_min_s=0.01, quota_max_s=0.02))
    )
    requests = wants(names, 2, max_tokens=40)
    for wanted in requests:
        engine.add(wanted)
    gathered, both = Gathered(), 0
    while engine.has_work():
        gathered.take(engine.step())
        stats = engine.stats()
        assert stats.pool is not None
        both += len(set(stats.resident_models) | set(stats.pool.arriving_models)) == 2
    assert both > 0
    check_tokens(checkpoint, requests, gathered)
    assert engine.weights.loads_total == 2, "both fit: neither is loaded twice"


def host_bytes(engine: TorchEngine) -> int:
    pool = engine.stats().pool
    assert pool is not None
    return pool.host_cache_bytes


def test_host_copies_are_given_back_and_read_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    settings = slot_for_one([checkpoint(name) for name in NAMES], kv_bytes=2**17)
    sizes = []
    for name in NAMES:
        probe = TorchEngine(settings, time.monotonic)
        probe.load(name, spec_of(name, checkpoint(name)))
        sizes.append(host_bytes(probe))
    cache_bytes = max(sizes) + sorted(sizes)[1]
    assert cache_bytes < sum(sizes)
    engine = pool(checkpoint, cache_folder=tmp_path, cache_bytes=cache_bytes, prefetch=False)
    requests = wants(NAMES, 2)
    for wanted in requests:
        engine.add(wanted)
    check_tokens(checkpoint, requests, drain(engine, steps_max=100_000))
    assert host_bytes(engine) <= cache_bytes


def handed(engine: TorchEngine) -> tuple[list[EngineOutput], Gathered]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    gathered = Gathered()
    gathered.take([output for output in outputs if output.kv is None])
    return [output for output in outputs if output.kv is not None], gathered


def test_a_prefill_slot_exports_kv_and_a_decode_slot_continues(checkpoint: Checkpoint, tmp_path: Path) -> None:
    kv_bytes = 32 * 2**14
    first = pool(checkpoint, prefill_only=True, host_kv_file=tmp_path / "kv", host_kv_bytes=2**21, kv_bytes=kv_bytes)
    second = pool(checkpoint, kv_bytes=kv_bytes)
    requests = wants(NAMES, 3)
    for wanted in requests:
        first.add(wanted)
    leaving, begun = handed(first)
    assert {output.request_id for output in leaving} == {wanted.request_id for wanted in requests}
    by_id = {wanted.request_id: wanted for wanted in requests}
    first.check()
    for output in leaving:
        assert output.kv is not None
        wanted = by_id[output.request_id]
        kv = output.kv if output.request_id != "llama-0" else structs.replace(output.kv, file=str(tmp_path / "gone"))
        second.add(structs.replace(wanted, generated=begun.tokens[output.request_id], kv=kv))
    assert second.requests.prefills.groups[0].waiting[0].request_id == "llama-0", "what cannot be read is prefilled"
    assert sum(len(group.waiting) for group in second.requests.prefills.groups) == 1
    rest = drain(second, steps_max=50_000)
    for wanted in requests:
        first.release(wanted.request_id)
        made = begun.tokens[wanted.request_id] + rest.tokens[wanted.request_id]
        assert made == greedy_tokens(checkpoint(wanted.instance_id), wanted.prompt, wanted.max_tokens)
    for engine in (first, second):
        engine.check()
        assert [instance.kv_used_bytes for instance in engine.stats().instances] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_cancelling_at_any_moment_frees_everything(checkpoint: Checkpoint, seed: int) -> None:
    chance = random.Random(seed)
    engine = pool(checkpoint, host_kv_bytes=16 * 2**14)
    requests = wants(NAMES, 5, max_tokens=12)
    cancelled = set()
    gathered = Gathered()
    for wanted in requests:
        engine.add(wanted)
        for _ in range(chance.randrange(12)):
            gathered.take(engine.step())
        victim = chance.choice(requests).request_id
        if chance.random() < 0.4:
            engine.cancel(victim)
            cancelled.add(victim)
        engine.check()
    while engine.has_work():
        gathered.take(engine.step())
        engine.check()
    for wanted in requests:
        if wanted.request_id not in cancelled:
            expected = greedy_tokens(checkpoint(wanted.instance_id), wanted.prompt, wanted.max_tokens)
            assert gathered.tokens[wanted.request_id] == expected
    assert [instance.kv_used_bytes for instance in engine.stats().instances] == [0, 0, 0]


def test_weights_in_borrowed_slabs_are_evicted_for_their_own_models_kv(checkpoint: Checkpoint) -> None:
    """Prefetched above the reserve, a model gets a request that needs all of the KV."""
    names = NAMES[:2]
    slabs = 24
    engine = pool(checkpoint, names, kv_bytes=slabs * 2**14)
    for wanted in wants(names, 1):
        engine.add(wanted)
    drain(engine)
    above = max(engine.arena.runs.values(), key=lambda run: run.end)
    assert above.end > engine.arena.weights_slabs, "one of them borrowed slabs of KV"
    name = next(name for name, run in engine.arena.runs.items() if run == above)
    tokens = min(250, engine.stats().instances[0].kv_tokens_max)
    wanted = request("all", prompt_of(3, tokens - 10), instance_id=name, max_tokens=10)
    engine.add(wanted)
    check_tokens(checkpoint, [wanted], drain(engine, steps_max=3000))
    engine.check()


def test_a_partly_prefilled_batch_request_is_preempted(checkpoint: Checkpoint) -> None:
    names = NAMES[:2]
    engine = pool(checkpoint, names, prefill_tokens_per_step_max=16, kv_bytes=8 * 2**14)
    length = engine.stats().instances[0].kv_tokens_max * 2 // 3
    batch = request("batch", prompt_of(4, min(length, 150)), instance_id=names[0], tier="NIW", max_tokens=4)
    engine.add(batch)
    gathered = Gathered()
    for _ in range(4):
        gathered.take(engine.step())
    urgent = request("urgent", prompt_of(5, min(length, 150)), instance_id=names[1], tier="IW-F", max_tokens=4)
    engine.add(urgent)
    rest = drain(engine, steps_max=3000)
    assert gathered.tokens == {}
    check_tokens(checkpoint, [batch, urgent], rest)
    engine.check()


def test_kv_that_host_memory_cannot_hold_is_not_promised(checkpoint: Checkpoint, tmp_path: Path) -> None:
    engine = pool(checkpoint, ["llama"], prefill_only=True, host_kv_file=tmp_path / "kv", host_kv_bytes=2**14)
    tokens_max = engine.stats().instances[0].kv_tokens_max
    with pytest.raises(ContextLengthError, match="KV cache"):
        engine.add(request("long", prompt_of(6, tokens_max), instance_id="llama", max_tokens=1))
    engine.add(request("fits", prompt_of(6, tokens_max - 4), instance_id="llama", max_tokens=4))
    leaving, _ = handed(engine)
    assert [output.request_id for output in leaving] == ["fits"]
