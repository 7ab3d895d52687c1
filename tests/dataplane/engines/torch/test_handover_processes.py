"""A prefill slot and a decode slot in processes of their own, one of which dies while KV is transferred."""

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.memory.events import Event, FlagEvent
from dataplane.protocol.errors import DeviceLostError
from tests.dataplane.engines.torch.fake_streams import FakeEvents
from tests.dataplane.engines.torch.handing import DELAY_S, Handing, Streams, table_of
from tests.dataplane.engines.torch.test_handover import (
    NAMES,
    WAIT_S,
    Wait,
    check_free,
    check_tokens,
    events_of,
    loaded,
    prefill_slot,
    slot,
    wants,
    within,
)
from tests.dataplane.engines.torch.tiny import spec_of

Checkpoint = Callable[[str], Path]
SPAWN = multiprocessing.get_context("spawn")


class Stopped:
    """Streams of a device whose KV transfers are issued and never end. Where `host`, they are not even issued."""

    def __init__(self, *, host: bool) -> None:
        self._streams = Streams("stopped", device=not host, fail_share=0.0)
        self._host = host

    def make(self, name: str) -> CopyStream:
        return _Endless(self._streams.make(name), host=self._host) if name == "kv_out" else self._streams.make(name)


class _Endless:
    def __init__(self, inner: CopyStream, *, host: bool) -> None:
        self._inner = inner
        self._host = host

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        return self._inner.submit(copies, [*after, FlagEvent() if self._host else _NeverPasses()])

    def close(self) -> None:
        self._inner.close()


class _NeverPasses:
    """An event for which a stream waits on its device."""

    error = None

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        from tests.dataplane.engines.torch import fake_streams  # noqa: PLC0415

        fake_streams._present.queue.put(lambda: time.sleep(3600))


def run_slot(
    connection: Connection, settings: TorchEngineSettings, folders: dict[str, Path], device: Path | None, stops: str
) -> None:
    """A slot's process: requests come in, (method, argument) each, and what steps make goes out."""
    streams = Stopped(host=stops == "host") if stops else Streams("process", device=device is not None)
    events = None if device is None else FakeEvents(device, random.Random(0), DELAY_S)
    engine = TorchEngine(settings, time.monotonic, streams.make, events=events)
    for name, folder in folders.items():
        engine.load(name, spec_of(name, folder))
    connection.send([])
    while True:
        while connection.poll(0 if engine.has_work() else 0.01):
            method, argument = connection.recv()
            getattr(engine, method)(argument)
        outputs = engine.step()
        if outputs:
            connection.send(outputs)


class RemoteSlot:
    """The other end of such a process."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self.process, self._connection = process, connection

    def add(self, request: EngineRequest) -> None:
        self._connection.send(("add", request))

    def release(self, request_id: str) -> None:
        if self.process.is_alive():
            self._connection.send(("release", request_id))

    def step(self) -> list[EngineOutput]:
        """What it has made since."""
        outputs: list[EngineOutput] = []
        while self.process.is_alive() and self._connection.poll():
            outputs += self._connection.recv()
        return outputs

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def remote(
    checkpoint: Checkpoint, settings: TorchEngineSettings, device: Path | None, *, stops: str = ""
) -> Iterator[RemoteSlot]:
    here, there = SPAWN.Pipe()
    folders = {name: checkpoint(name) for name in NAMES}
    process = SPAWN.Process(target=run_slot, args=(there, settings, folders, device, stops), daemon=True)
    process.start()
    there.close()
    slot = RemoteSlot(process, here)
    try:
        assert here.poll(WAIT_S), "the process did not start"
        here.recv()
        yield slot
    finally:
        slot.kill()


@pytest.fixture
def decoder(checkpoint: Checkpoint, tmp_path: Path, wait: Wait) -> TorchEngine:
    streams = Streams("decode", device=wait == "device")
    return loaded(checkpoint, slot(checkpoint), streams.make, events=events_of(wait, tmp_path, "decode"))


def decode_on(handing: Handing) -> None:
    """Step the decode slot until all is done."""
    for _ in within(WAIT_S):
        handing.decode()
        if handing.over:
            return


def table(wait: Wait, folder: Path) -> Path | None:
    return table_of(folder, "prefill") if wait == "device" else None


@pytest.mark.parametrize("wait", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_two_processes_hand_over_what_they_transfer(
    wait: Wait, decoder: TorchEngine, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with remote(checkpoint, prefill_slot(checkpoint, tmp_path, kv_events="device"), table(wait, tmp_path)) as prefiller:
        handing = Handing(wanted=wants(4), decoder=decoder, release=prefiller.release)
        for one in handing.wanted.values():
            prefiller.add(one)
        for _ in within(WAIT_S):
            handing.prefilled(prefiller.step())
            handing.decode()
            if handing.over:
                break
        check_tokens(checkpoint, handing)
        assert handing.announced > 0
        check_free(decoder)
        decoder.close()


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["host"])
def test_a_prefill_slot_that_dies_before_its_transfers_pass_is_not_waited_for(
    wait: Wait, decoder: TorchEngine, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Its file and events may still be there: another process made them."""
    with remote(checkpoint, prefill_slot(checkpoint, tmp_path), None, stops="host") as prefiller:
        handing = Handing(wanted=wants(1), decoder=decoder, release=prefiller.release)
        for one in handing.wanted.values():
            prefiller.add(one)
        for _ in within(WAIT_S):
            handing.prefilled(prefiller.step())
            handing.decode()
            if len(handing.decoding) == len(handing.wanted):
                break
        assert handing.announced == len(handing.wanted)
        assert not handing.gathered.finished
        prefiller.kill()
        decode_on(handing)
        check_tokens(checkpoint, handing)
        check_free(decoder)


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["device"])
def test_a_device_that_waits_for_a_dead_process_ends_its_worker(
    wait: Wait, decoder: TorchEngine, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else ends the wait of a stream. The agent starts another worker, and requests go on there."""
    monkeypatch.setattr("dataplane.engines.torch.memory.kv_imports.DEVICE_WAIT_MAX_S", 1.0)
    settings = prefill_slot(checkpoint, tmp_path, kv_events="device")
    with remote(checkpoint, settings, table(wait, tmp_path), stops="device") as prefiller:
        handing = Handing(wanted=wants(1), decoder=decoder, release=prefiller.release)
        for one in handing.wanted.values():
            prefiller.add(one)
        for _ in within(WAIT_S):
            handing.prefilled(prefiller.step())
            handing.decode()
            if decoder.kv.imports.waited_for["device"]:
                break
        prefiller.kill()
        with pytest.raises(DeviceLostError, match="has not passed for 1 s"):
            decode_on(handing)


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["host"])
def test_kv_of_a_decode_slot_that_dies_is_kept_until_release(
    wait: Wait, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Another decode slot reads it, by the same event."""
    streams = Streams("prefill")
    prefiller = loaded(checkpoint, prefill_slot(checkpoint, tmp_path), streams.make)
    wanted = wants(1)
    for one in wanted.values():
        prefiller.add(one)
    made: dict[str, tuple[int, ...]] = {}
    handed: dict[str, EngineRequest] = {}
    with remote(checkpoint, slot(checkpoint), None) as decoder:
        for _ in within(WAIT_S):
            for output in prefiller.step():
                if output.kv is None:
                    made[output.request_id] = output.token_ids
                    continue
                generated = made[output.request_id]
                handed[output.request_id] = structs.replace(
                    wanted[output.request_id], generated=generated, kv=output.kv
                )
                decoder.add(handed[output.request_id])
            if len(handed) == len(wanted):
                break
        decoder.kill()
    other = loaded(checkpoint, slot(checkpoint), Streams("other").make)
    handing = Handing(wanted=wanted, decoder=other, release=prefiller.release)
    for name, one in handed.items():
        handing.gathered.tokens[name] = one.generated
        handing.decoding[name] = True
        other.add(one)
    for _ in within(WAIT_S):
        prefiller.step()
        handing.decode()
        if handing.over:
            break
    check_tokens(checkpoint, handing)
    assert other.stats().extra["swapped_in"] >= len(wanted)
    check_free(prefiller, other)
