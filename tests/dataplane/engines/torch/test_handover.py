"""KV that is handed over while it is transferred: by transfers that are late, reordered and failing, between slots and
between processes, no token shows it.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import structs

from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.engines.torch.copies.interprocess import DeviceEvents
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.memory import kv_exports
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.memory.events import FlagEvent
from dataplane.memory.shared_events import event_file
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.fake_streams import FakeEvents
from tests.dataplane.engines.torch.faults import FaultyStream
from tests.dataplane.engines.torch.handing import DELAY_S, Handing, Streams, table_of
from tests.dataplane.engines.torch.slots import SLAB_BYTES, slot_for_one
from tests.dataplane.engines.torch.tiny import VOCABULARY, greedy_tokens, spec_of

Checkpoint = Callable[[str], Path]
Wait = Literal["device", "refused", "host", "off"]
NAMES = ("llama", "qwen3", "gemma3_text")
QUICK = TurnSettings(decode=DecodeSettings(quota_min_s=0.001, quota_max_s=0.005))
WAIT_S = 300.0
"""Nothing takes that long, but on a machine that does much else."""


def prompt_of(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]


def wants(each: int) -> dict[str, EngineRequest]:
    made = [
        request(f"{name}-{number}", prompt_of(number, 5 + 7 * number), instance_id=name, max_tokens=10)
        for number in range(each)
        for name in NAMES
    ]
    return {one.request_id: one for one in made}


def slot(checkpoint: Checkpoint, **changes: Any) -> TorchEngineSettings:
    """An arena for one of the models at a time."""
    given: dict[str, Any] = {"kv_bytes": 12 * SLAB_BYTES, "block_tokens": 4, "turns": QUICK, **changes}
    return slot_for_one([checkpoint(name) for name in NAMES], **given)


def prefill_slot(checkpoint: Checkpoint, folder: Path, **changes: Any) -> TorchEngineSettings:
    given = {"prefill_only": True, "host_kv_file": folder / "kv", "host_kv_bytes": 2**20, **changes}
    return slot(checkpoint, **given)


def events_of(wait: Wait, folder: Path, name: str) -> DeviceEvents | None:
    if wait not in ("device", "refused"):
        return None
    return FakeEvents(table_of(folder, name), random.Random(name), DELAY_S, refuses=wait == "refused")


def loaded(checkpoint: Checkpoint, settings: TorchEngineSettings, *given: Any, **events: Any) -> TorchEngine:
    engine = TorchEngine(settings, time.monotonic, *given, **events)
    for name in NAMES:
        engine.load(name, spec_of(name, checkpoint(name)))
    return engine


def pair(
    checkpoint: Checkpoint, folder: Path, wait: Wait, streams: tuple[Streams, Streams]
) -> tuple[TorchEngine, TorchEngine]:
    """A prefill slot and a decode slot."""
    kv_events = "off" if wait == "off" else "device"
    first = prefill_slot(checkpoint, folder, kv_events=kv_events)
    makers = [one.make for one in streams]
    return (
        loaded(checkpoint, first, makers[0], events=events_of(wait, folder, "prefill")),
        loaded(checkpoint, slot(checkpoint), makers[1], events=events_of(wait, folder, "decode")),
    )


def within(seconds: float) -> Iterator[None]:
    """Go on for so long at most."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        yield
    raise AssertionError(f"not done after {seconds} s")


def serve(prefiller: TorchEngine, handing: Handing, *, cancel: Sequence[str] = ()) -> None:
    """Step both slots until all is done; those to `cancel` go one after the other, wherever they are."""
    leaving = list(cancel)
    for one in handing.wanted.values():
        prefiller.add(one)
    for number, _ in enumerate(within(WAIT_S)):
        handing.prefilled(prefiller.step())
        handing.decode()
        if leaving and number % 3 == 2:
            prefiller.cancel(leaving[-1])
            handing.cancel(leaving.pop())
        if handing.over and not leaving and not prefiller.has_work():
            return


def check_tokens(checkpoint: Checkpoint, handing: Handing) -> None:
    assert handing.gathered.errors == {}
    for one in handing.wanted.values():
        expected = greedy_tokens(checkpoint(one.instance_id), one.prompt, one.max_tokens)
        assert handing.gathered.tokens[one.request_id] == expected, one.request_id


def check_free(*engines: TorchEngine) -> None:
    """That no memory and no event is in use once transfers have ended."""
    for engine in engines:
        for _ in within(WAIT_S):
            engine.step()
            if not (
                engine.kv.host_cache.usage() and any(u.moving_bytes for u in engine.kv.host_cache.usage().values())
            ):
                break
        engine.check()
        assert [instance.kv_used_bytes for instance in engine.stats().instances] == [0] * len(NAMES)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("wait", ["device", "refused", "host", "off"])
def test_late_reordered_and_failing_transfers_change_no_token(
    wait: Wait, seed: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    device = wait in ("device", "refused")
    streams = Streams(f"{seed} first", device=device), Streams(f"{seed} second", device=device)
    prefiller, decoder = pair(checkpoint, tmp_path, wait, streams)
    handing = Handing(wanted=wants(4), decoder=decoder, release=prefiller.release)
    serve(prefiller, handing)
    check_tokens(checkpoint, handing)
    waited = decoder.kv.imports.waited_for
    assert sum(waited.values()) == len(handing.wanted)
    assert (handing.announced > 0) is (wait != "off")
    assert (waited["device"] > 0) is (wait == "device")
    assert (waited["host"] > 0) is (wait in ("refused", "host")) or wait == "device"
    assert sum(stream.failed for one in streams for name, stream in one.made.items() if name.startswith("kv")) > 0
    check_free(prefiller, decoder)
    prefiller.close()
    decoder.close()


@pytest.mark.parametrize("wait", ["device", "host"])
@pytest.mark.parametrize("seed", range(2))
def test_requests_that_leave_while_their_kv_is_transferred_free_everything(
    wait: Wait, seed: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    device = wait == "device"
    streams = Streams(f"{seed} first", device=device), Streams(f"{seed} second", device=device)
    prefiller, decoder = pair(checkpoint, tmp_path, wait, streams)
    handing = Handing(wanted=wants(5), decoder=decoder, release=prefiller.release)
    leaving = random.Random(seed).sample(sorted(handing.wanted), 8)
    serve(prefiller, handing, cancel=leaving)
    check_tokens(checkpoint, handing)
    assert handing.announced > 0
    check_free(prefiller, decoder)
    prefiller.close()
    decoder.close()


@pytest.mark.parametrize("wait", ["device", "host"])
def test_a_transfer_that_is_given_up_is_prefilled_again(wait: Wait, checkpoint: Checkpoint, tmp_path: Path) -> None:
    first = Streams("first", device=wait == "device")
    prefiller, decoder = pair(checkpoint, tmp_path, wait, (first, Streams("second", fail_share=0.0)))
    faulty: FaultyStream = first.made["kv_out"]
    faulty.fail_share, faulty.fails_in_a_row_max = 1.0, 1000
    handing = Handing(wanted=wants(1), decoder=decoder, release=prefiller.release)
    serve(prefiller, handing)
    check_tokens(checkpoint, handing)
    assert handing.announced == len(handing.wanted)
    assert decoder.stats().extra["swapped_in"] > 0
    check_free(prefiller, decoder)
    prefiller.close()
    decoder.close()


def test_a_slot_that_does_not_transfer_what_it_announced_is_not_waited_for_without_end(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Its process lives, as where its GPU hangs. Requests whose KV is there go on meanwhile."""
    held = FlagEvent()
    prefiller, decoder = pair(checkpoint, tmp_path, "host", (Streams("first", fail_share=0.0),) * 2)
    decoder.kv.imports._wait_max_s = 0.5
    handing = Handing(wanted=wants(1), decoder=decoder, release=prefiller.release)
    prefiller.kv._out.submit((), [held])  # all transfers are behind it
    serve(prefiller, handing)
    check_tokens(checkpoint, handing)
    assert handing.announced == len(handing.wanted)
    held.finish()
    check_free(prefiller, decoder)


def test_more_transfers_than_events_are_announced_when_they_have_ended(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_exports, "SLOTS", 2)
    streams = Streams("first"), Streams("second")
    prefiller, decoder = pair(checkpoint, tmp_path, "host", streams)
    handing = Handing(wanted=wants(2), decoder=decoder, release=prefiller.release)
    for one in handing.wanted.values():
        prefiller.add(one)
    while prefiller.has_work():
        handing.prefilled(prefiller.step())
    while not handing.over:
        handing.decode()
    check_tokens(checkpoint, handing)
    assert handing.announced == 2
    check_free(prefiller, decoder)


@pytest.mark.parametrize("change", ["slot", "file"])
def test_an_event_that_is_not_there_is_no_reason_to_read_kv(
    change: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    prefiller, decoder = pair(checkpoint, tmp_path, "host", (Streams("first"), Streams("second")))
    (wanted,) = [one for one in wants(1).values() if one.instance_id == "llama"]
    prefiller.add(wanted)
    outputs: list[EngineOutput] = []
    while prefiller.has_work():
        outputs += prefiller.step()
    made, left = outputs
    assert left.kv is not None
    assert left.kv.event is not None
    if change == "file":
        event_file(tmp_path / "kv").unlink()
    slot = 2**20 if change == "slot" else left.kv.event.slot
    kv = structs.replace(left.kv, event=structs.replace(left.kv.event, slot=slot))
    decoder.add(structs.replace(wanted, generated=made.token_ids, kv=kv))
    rest = drain(decoder, steps_max=50_000).tokens[wanted.request_id]
    assert made.token_ids + rest == greedy_tokens(checkpoint("llama"), wanted.prompt, wanted.max_tokens)
    assert sum(decoder.kv.imports.waited_for.values()) == 0
