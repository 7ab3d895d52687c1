"""Host copies: who waits when host memory is short, for how long, and who gives back, when, on which thread."""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from dataplane.engines.torch.copies import cuda as cuda_copies
from dataplane.engines.torch.copies import open as opening
from dataplane.engines.torch.copies.open import PINS
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.memory import host_models, releases
from dataplane.engines.torch.memory.host_models import HostModel, HostModels
from dataplane.memory.events import FlagEvent
from dataplane.memory.model_cache import HostMemoryError, ModelCache
from dataplane.protocol.errors import ModelLoadError
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.slots import SLAB_BYTES, slot_for_one
from tests.dataplane.engines.torch.tiny import spec_of
from tests.event_loop import PATIENCE_S

Checkpoint = Callable[[str], Path]
NAMES = ("llama", "qwen3")


class Slot:
    """A slot's host models over a cache that holds the larger of two models and no more. `ranks`: who may leave."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, **changes: Any) -> None:
        self.checkpoint = checkpoint
        self.ranks: dict[str, int | None] = {}
        self.asked: list[int] = []
        probe = self.host_models(None)
        self.size_bytes = max(self.prepare(name, probe).skeleton.size_bytes for name in NAMES)
        probe.close()
        self.asked.clear()
        self.cache = ModelCache(folder, self.size_bytes)
        self.models = self.host_models(self.cache, **changes)

    def host_models(self, cache: ModelCache | None, **changes: Any) -> HostModels:
        return HostModels(
            cache,
            torch.float32,
            torch.device("cpu"),
            SLAB_BYTES,
            leave_rank=self.rank,
            in_use=lambda name: False,
            **changes,
        )

    def rank(self, name: str) -> int | None:
        self.asked.append(threading.get_ident())
        return self.ranks.get(name)

    def prepare(self, name: str, models: HostModels | None = None) -> HostModel:
        return (models or self.models).prepare(name, self.checkpoint(name), slabs_max=10**6)

    def step(self, model: HostModel, models: HostModels | None = None) -> bool:
        """What the engine does between two steps, and whether the model is there then."""
        models = models or self.models
        models.release_spare()
        return models.ready(model)

    def until_ready(self, model: HostModel, models: HostModels | None = None) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not self.step(model, models):
            assert time.monotonic() < until_s, f"{model.name} never came"
            threading.Event().wait(0.001)


@pytest.fixture
def slot(checkpoint: Checkpoint, tmp_path: Path) -> Iterator[Slot]:
    made = Slot(checkpoint, tmp_path)
    yield made
    made.models.close()


def test_a_postponed_model_is_logged_once_with_what_lacks_and_what_holds_the_memory(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_models, "WARN_AFTER_S", 0.1)
    slot.prepare("llama")
    with capture_logs() as logs:
        postponed = slot.prepare("qwen3")
        assert logs == [], "models that take turns wait a moment all the time"
        asked = len(slot.asked)
        while len(slot.asked) < asked + 6:
            assert not slot.step(postponed)
            threading.Event().wait(0.01)
    assert postponed.host is None
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert (line["model"], line["size_bytes"]) == ("qwen3", postponed.skeleton.size_bytes)
    assert 0 < line["lack_bytes"] <= slot.size_bytes
    (holder,) = line["held_by"]
    assert holder.startswith("llama-")


def test_the_reading_thread_asks_and_the_engines_own_gives(slot: Slot) -> None:
    first = slot.prepare("llama")
    postponed = slot.prepare("qwen3")
    slot.ranks["llama"] = 1
    slot.until_ready(postponed)
    assert first.host is None
    assert set(slot.asked) == {threading.get_ident()}


def test_another_thread_gets_an_error_if_host_memory_is_full(slot: Slot) -> None:
    slot.prepare("llama")
    with ThreadPoolExecutor(1) as loader:
        refused = loader.submit(slot.prepare, "qwen3")
        with pytest.raises(HostMemoryError):
            refused.result()
        slot.ranks["llama"] = 0
        slot.models.release_spare()
        assert loader.submit(slot.prepare, "qwen3").result().host is not None
    assert set(slot.asked) == {threading.get_ident()}


def test_a_model_that_waits_for_host_memory_for_too_long_fails_and_names_the_limit(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    slot = Slot(checkpoint, tmp_path, host_wait_max_s=0.05)
    slot.prepare("llama")
    postponed = slot.prepare("qwen3")
    with pytest.raises(ModelLoadError, match=r"host_wait_max_s=0.05: qwen3-\w+: \d+ bytes do not fit .*in use: llama-"):
        slot.until_ready(postponed)
    slot.ranks["llama"] = 0
    slot.until_ready(postponed)
    assert postponed.short_since_s is None
    slot.models.close()


def test_two_preparers_of_a_new_model_build_it_once(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    built, build = list[str](), host_models.build_skeleton
    building, go_on = threading.Event(), threading.Event()

    def slow(folder: Path, *args: Any) -> Any:
        built.append(folder.name)
        building.set()
        assert go_on.wait(30)
        return build(folder, *args)

    monkeypatch.setattr(host_models, "build_skeleton", slow)
    with ThreadPoolExecutor(2) as loaders:
        first = loaders.submit(slot.prepare, "llama")
        assert building.wait(30)
        second = loaders.submit(slot.prepare, "llama")
        with pytest.raises(TimeoutError):
            second.result(0.05)  # it waits for the first
        go_on.set()
        assert second.result() is first.result()
    assert len(built) == 1
    assert first.result().host is not None


def test_a_model_is_read_again_while_another_one_is_prepared(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = Slot(checkpoint, tmp_path / "small")
    models = slot.host_models(ModelCache(tmp_path / "large", 10 * slot.size_bytes))
    resident = slot.prepare("llama", models)
    models.release_copy(resident)
    reading, go_on, read = threading.Event(), threading.Event(), host_models.read_weights

    def slow(*what: Any) -> None:
        reading.set()
        assert go_on.wait(PATIENCE_S)
        read(*what)

    monkeypatch.setattr(host_models, "read_weights", slow)
    with ThreadPoolExecutor(1) as loader:
        other = loader.submit(slot.prepare, "qwen3", models)
        assert reading.wait(PATIENCE_S)
        try:
            slot.until_ready(resident, models)
            assert not other.done()
        finally:
            go_on.set()
        assert other.result().host is not None
    models.close()
    slot.models.close()


def test_a_model_that_is_read_again_and_prepared_at_once_is_read_once(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = Slot(checkpoint, tmp_path)
    model = slot.prepare("llama")
    slot.models.release_copy(model)
    slot.models.release_spare()
    next(tmp_path.glob("*.model")).unlink()
    reads, go_on, read = list[int](), threading.Event(), host_models.read_weights

    def slow(*what: Any) -> None:
        reads.append(threading.get_ident())
        assert go_on.wait(PATIENCE_S)
        read(*what)

    monkeypatch.setattr(host_models, "read_weights", slow)
    while not reads:
        assert not slot.step(model)
    with ThreadPoolExecutor(1) as loader:
        prepared = loader.submit(slot.prepare, "llama")
        with pytest.raises(TimeoutError):
            prepared.result(0.05)  # it waits for the reading thread
        go_on.set()
        assert prepared.result() is model
    slot.until_ready(model)
    assert len(reads) == 1
    assert model.cached is not None
    assert model.cached.path.exists()
    slot.models.close()


def test_a_copy_in_flight_keeps_its_source_pinned(
    slot: Slot, monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint
) -> None:
    unpinned: list[int] = []
    monkeypatch.setattr(releases, "unpinned", lambda host, *_: unpinned.append(host.data_ptr()))
    model = slot.prepare("llama")
    assert model.host is not None
    address, in_flight = model.host.data_ptr(), FlagEvent()
    model.copies.append(in_flight)
    slot.models.forget("llama")
    slot.models.release_spare()
    assert (model.host, unpinned) == (None, [])
    assert slot.cache.used_bytes > 0
    in_flight.finish()
    slot.models.release_spare()
    assert unpinned == [address]


def test_a_host_copy_is_unpinned_beside_the_engine_and_then_given_back(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake driver, without a GPU."""
    calls: list[tuple[str, int, int]] = []
    go_on = threading.Event()

    def note(call: str, host: torch.Tensor) -> None:
        assert call == "pin" or go_on.wait(30)
        calls.append((call, host.nbytes, threading.get_ident()))

    cuda = torch.device("cuda")
    monkeypatch.setattr(cuda_copies, "PIN_BYTES", 2**16)
    monkeypatch.setattr(opening, "pin", lambda host: note("pin", host))
    monkeypatch.setattr(opening, "unpin", lambda host: note("unpin", host))
    monkeypatch.setattr(host_models, "pinned", lambda host, _: opening.pinned(host, cuda))
    monkeypatch.setattr(releases, "unpinned", lambda host, _, then: opening.unpinned(host, cuda, then))
    model = slot.prepare("llama")
    size_bytes = model.skeleton.size_bytes
    assert sum(size for _, size, _ in calls) == size_bytes
    slot.models.forget("llama")
    slot.models.release_spare()  # returns, although the driver does not
    postponed = slot.prepare("qwen3")
    assert postponed.host is None, "it is still pinned, so its place is taken"
    go_on.set()
    slot.until_ready(postponed)
    assert sum(size for call, size, _ in calls if call == "unpin") == size_bytes
    assert max(size for _, size, _ in calls) <= 2**16
    assert threading.get_ident() not in {thread for _, _, thread in calls}


def test_what_is_forgotten_while_it_is_read_is_let_go_by_the_engines_thread(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpinned_by: list[int] = []
    monkeypatch.setattr(releases, "unpinned", lambda *_: unpinned_by.append(threading.get_ident()))
    reading, go_on = threading.Event(), threading.Event()
    read = host_models.read_weights

    def slow(*what: Any) -> None:
        reading.set()
        assert go_on.wait(30)
        read(*what)

    slot.prepare("llama")
    postponed = slot.prepare("qwen3")
    slot.models.forget("llama")
    slot.models.release_spare()
    unpinned_by.clear()
    monkeypatch.setattr(host_models, "read_weights", slow)
    while not reading.is_set():
        assert not slot.step(postponed)
    slot.models.forget("qwen3")
    go_on.set()
    while not unpinned_by:
        slot.models.release_spare()
    assert unpinned_by == [threading.get_ident()]
    assert postponed.host is None


@pytest.mark.parametrize("when", ["before it is read", "while it is read", "removed"])
@pytest.mark.parametrize("has_cache", [True, False])
def test_a_checkpoint_that_changed_since_its_model_was_built_is_not_read_again(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, has_cache: bool
) -> None:
    """The model's KV is of the former weights, and other slots know those by the same key."""
    folders = {name: Path(shutil.copytree(checkpoint(name), tmp_path / name)) for name in NAMES}
    slot = Slot(folders.__getitem__, tmp_path / "cache")
    models = slot.models if has_cache else slot.host_models(None)
    model = slot.prepare("llama", models)
    models.release_copy(model)
    models.release_spare()
    slot.prepare("qwen3")  # takes its place in the cache
    slot.models.forget("qwen3")
    slot.models.release_spare()
    weights, read = folders["llama"] / "model.safetensors", host_models.read_weights

    def replacing(*what: Any) -> None:
        read(*what)
        os.utime(weights, (0, 0))

    if when == "while it is read":
        monkeypatch.setattr(host_models, "read_weights", replacing)
    elif when == "removed":
        weights.unlink()
    else:
        os.utime(weights, (0, 0))
    error = "No such file" if when == "removed" else "the checkpoint changed since it was loaded"
    with pytest.raises(ModelLoadError, match=error):
        slot.until_ready(model, models)
    assert model.host is None
    assert not list((tmp_path / "cache").glob("llama*"))
    monkeypatch.undo()
    models.forget("llama")
    if when != "removed":
        assert slot.prepare("llama", models).key != model.key
    models.close()
    slot.models.close()


def test_the_engine_tells_what_host_memory_is_worth_and_keeps_to_the_limit(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    engine = TorchEngine(
        slot_for_one([folder], kv_bytes=2**17, cache_folder=tmp_path, host_wait_max_s=7.0), time.monotonic
    )
    engine.load("a", spec_of("llama", folder))
    assert engine.host_models.host_wait_max_s == 7.0
    pool = engine.stats().pool
    assert pool is not None
    assert pool.weights_bytes_per_s == pytest.approx(engine.weights.bytes_per_s)
    assert pool.unpinned is None
    monkeypatch.setattr(PINS, "_reason", "ulimit -l is 8 bytes")
    pool = engine.stats().pool
    assert pool is not None
    assert pool.unpinned == "0 bytes of host memory are not pinned: ulimit -l is 8 bytes"
    engine.close()


def test_the_engine_reports_a_model_that_can_no_longer_be_read_until_it_is_loaded_anew(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one for which host memory is short: it can be read later."""
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))
    engine = TorchEngine(slot_for_one([folder], kv_bytes=2**17, cache_folder=tmp_path / "cache"), time.monotonic)
    engine.load("a", spec_of("llama", folder))

    def ask(request_id: str) -> str | None:
        engine.add(request(request_id, [1, 2, 3], instance_id="a", max_tokens=2))
        return drain(engine, steps_max=10**6).errors.get(request_id)

    def short(_: HostModel) -> bool:
        raise ModelLoadError("host memory was full") from HostMemoryError("7 bytes lack")

    with monkeypatch.context() as patch:
        patch.setattr(engine.host_models, "ready", short)
        assert "host memory was full" in (ask("short") or "")
        assert engine.stats().failed == {}
    engine.host_models.release_copy(engine.models["llama"].weights)
    engine.host_models.release_spare()
    next((tmp_path / "cache").glob("*.model")).unlink()
    os.utime(folder / "model.safetensors", (0, 0))
    changed = "its weights cannot be read: .* the checkpoint changed since it was loaded"
    assert re.search(changed, ask("changed") or "")
    failed = engine.stats().failed
    assert list(failed) == ["a"]
    assert re.match(changed, failed["a"])
    engine.unload("a")
    engine.load("a", spec_of("llama", folder))
    assert ask("again") is None
    assert engine.stats().failed == {}
    engine.close()
