"""The model cache: filled once per node, shared, evicted by last use but never while mapped, consistent after kills."""

import errno
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.memory.model_cache import (
    CachedFile,
    HostMemoryError,
    ModelCache,
    available_bytes,
    choose_cache_evictions,
    default_cache_folder,
)

SPAWN = multiprocessing.get_context("spawn")


def filler(byte: int) -> Callable[[memoryview], None]:
    def fill(view: memoryview) -> None:
        view[:] = bytes([byte]) * len(view)

    return fill


def never(view: memoryview) -> None:
    raise AssertionError("filled twice")


def files(folder: Path) -> list[str]:
    return sorted(file.suffix for file in folder.iterdir() if file.suffix)


def models(folder: Path) -> set[str]:
    """The models that are complete."""
    return {file.name.partition(".")[0] for file in folder.glob("*.model")}


def test_a_model_is_filled_once_and_shared(tmp_path: Path) -> None:
    one = ModelCache(tmp_path / "cache", 100)
    first = one.acquire("any/key: ü", 40, filler(7))
    second = ModelCache(tmp_path / "cache", 100).acquire("any/key: ü", 40, never)
    first.view[3] = 9
    assert bytes(second.view) == bytes([7, 7, 7, 9]) + bytes([7]) * 36
    first.release()
    with pytest.raises(HostMemoryError, match=r"1 bytes lack; models in use: any-key- \(40 bytes\)") as full:
        one.acquire("other", 61, never)
    assert (full.value.lack_bytes, full.value.held) == (1, ("any-key-",))
    assert models(tmp_path / "cache") == {"any-key-"}
    assert one.used_bytes == 40


def test_the_least_recently_used_file_is_evicted_and_never_a_mapped_one(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, 100)
    held = cache.acquire("held", 40, filler(1))
    for name in ("a", "b"):
        cache.acquire(name, 30, filler(2)).release()
    cache.acquire("a", 30, never).release()
    cache.acquire("c", 30, filler(3)).release()
    assert models(tmp_path) == {"held", "a", "c"}
    with pytest.raises(HostMemoryError, match=r"big: 61 bytes do not fit .* of 100 bytes: 1 bytes lack; .* held "):
        cache.acquire("big", 61, never)
    assert models(tmp_path) == {"held", "a", "c"}, "nothing is evicted in vain"
    cache.acquire("big", 60, filler(4))
    assert bytes(held.view) == bytes([1]) * 40
    assert "a" not in models(tmp_path)


def test_use_counts_until_the_release(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, 100)
    long_used = cache.acquire("long", 50, filler(1))
    cache.acquire("short", 50, filler(1)).release()
    long_used.release()
    long_used.release()
    cache.acquire("new", 50, filler(1))
    assert models(tmp_path) == {"long", "new"}


def test_a_tensor_over_the_view_holds_the_file_after_its_release(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    cache = ModelCache(tmp_path, 100)
    model = cache.acquire("a", 80, filler(5))
    tensor = torch.frombuffer(model.view, dtype=torch.uint8)[10:20]
    model.release()
    with pytest.raises(HostMemoryError):
        cache.acquire("b", 80, filler(6))
    assert tensor.tolist() == [5] * 10
    del tensor
    cache.acquire("b", 80, filler(6))
    assert models(tmp_path) == {"b"}


def test_a_fill_that_fails_leaves_nothing_and_the_next_one_tries_again(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, 100)

    def fail(view: memoryview) -> None:
        view[:3] = b"abc"
        raise ValueError("no such shard")

    with pytest.raises(ValueError, match="no such shard"):
        cache.acquire("a", 90, fail)
    assert files(tmp_path) == []
    assert bytes(cache.acquire("a", 90, filler(1)).view) == bytes([1]) * 90


def test_threads_wait_for_the_one_that_fills(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, 1000)
    fills: list[str] = []

    def fill(view: memoryview) -> None:
        fills.append("fill")
        time.sleep(0.05)
        if len(fills) == 1:
            raise ValueError("the first one fails")
        view[:] = bytes([8]) * len(view)

    def acquire(_: int) -> int:
        try:
            return cache.acquire("a", 100, fill).view[99]
        except ValueError:
            return -1

    with ThreadPoolExecutor(6) as pool:
        found = sorted(pool.map(acquire, range(6)))
    assert found == [-1, 8, 8, 8, 8, 8]
    assert len(fills) == 2


def test_a_file_that_is_being_filled_counts(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, 100)
    begun, go_on = threading.Event(), threading.Event()

    def slow(view: memoryview) -> None:
        begun.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(1) as pool:
        filling = pool.submit(cache.acquire, "slow", 60, slow)
        assert begun.wait(60)
        assert models(tmp_path) == set()
        with pytest.raises(HostMemoryError, match=r"in use: slow \(60 bytes\)"):
            cache.acquire("other", 41, never)
        cache.acquire("small", 40, filler(1)).release()
        go_on.set()
        filling.result()
    assert cache.used_bytes == 100


def _fill_and_hang(folder: Path, begun: Path) -> None:
    def fill(view: memoryview) -> None:
        view[:5] = b"wrong"
        begun.touch()
        time.sleep(600)

    ModelCache(folder, 100).acquire("a", 80, fill)


@pytest.mark.parametrize("key", ["a", "b"])
def test_the_file_of_a_killed_filler_is_neither_used_nor_counted(tmp_path: Path, key: str) -> None:
    cache = ModelCache(tmp_path / "cache", 100)
    process = SPAWN.Process(target=_fill_and_hang, args=(tmp_path / "cache", tmp_path / "begun"))
    process.start()
    while not (tmp_path / "begun").exists():
        assert process.is_alive()
        time.sleep(0.01)
    assert process.pid is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.acquire, "a", 80, filler(3)) if key == "a" else None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if waiting is not None:
            assert bytes(waiting.result().view) == bytes([3]) * 80
        else:
            cache.acquire(key, 80, filler(3))
    process.close()
    assert files(tmp_path / "cache") == [".model"]


def _acquire_many(folder: Path, seed: int) -> None:
    cache = ModelCache(folder, 100)
    for step in range(60):
        byte = (step * 7 + seed * 3) % 5
        try:
            model = cache.acquire(f"model-{byte}", 30, filler(byte))
        except HostMemoryError:
            continue
        assert bytes(model.view) == bytes([byte]) * 30
        assert cache.used_bytes <= 100
        model.release()


@pytest.mark.slow
def test_processes_share_a_cache_that_holds_three_of_five_models(tmp_path: Path) -> None:
    processes = [SPAWN.Process(target=_acquire_many, args=(tmp_path, seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
        process.close()
    assert files(tmp_path) == [".model"] * 3


def test_a_stale_file_is_removed_before_any_model(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, 100)
    cache.acquire("a", 50, filler(1)).release()
    (tmp_path / "dead-50.filling").write_bytes(bytes(50))
    cache.acquire("b", 50, filler(2))
    assert models(tmp_path) == {"a", "b"}
    assert files(tmp_path) == [".model", ".model"]


class SmallDisk:
    """A file system that has `size_bytes` for the files of a folder, whatever a cache's own limit."""

    def __init__(self, folder: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.size_bytes = size_bytes
        self.allocate = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self.fallocate)
        monkeypatch.setattr(os, "statvfs", self.statvfs)

    def used_bytes(self, *suffixes: str) -> int:
        return sum(file.stat().st_size for file in self.folder.iterdir() if file.suffix in suffixes)

    def statvfs(self, folder: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=self.size_bytes - self.used_bytes(".model"), f_frsize=1)

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        if self.used_bytes(".model", ".filling") > self.size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.allocate(descriptor, offset, length)


def test_a_full_file_system_evicts_files_that_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ModelCache(tmp_path, 1000)
    SmallDisk(tmp_path, 100, monkeypatch)
    held = cache.acquire("held", 40, filler(1))
    for name in ("old", "new"):
        cache.acquire(name, 30, filler(2)).release()
    cache.acquire("more", 30, filler(3)).release()
    assert models(tmp_path) == {"held", "new", "more"}
    assert bytes(held.view) == bytes([1]) * 40


def test_a_full_file_system_is_an_error_and_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ModelCache(tmp_path, 1000)
    SmallDisk(tmp_path, 100, monkeypatch)
    cache.acquire("spare", 30, filler(1)).release()
    held = cache.acquire("held", 40, filler(1))
    with pytest.raises(
        HostMemoryError, match=r"a: 70 bytes do not fit on the file system of .*: 40 bytes lack; .* held "
    ):
        cache.acquire("a", 70, never)
    held.release()
    assert models(tmp_path) == {"spare", "held"}, "nothing is evicted in vain"
    assert bytes(cache.acquire("a", 70, filler(2)).view) == bytes([2]) * 70
    assert models(tmp_path) == {"a"}


def test_a_request_for_space_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, request = ModelCache(tmp_path, 100), tmp_path / "room-wanted"

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache.request_space()
    assert not cache.space_is_requested(), "this process itself did"
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: 1)
        assert cache.space_is_requested()
        os.utime(request, (0, 0))
        assert not cache.space_is_requested()
        with monkeypatch.context() as device:
            device.setattr(os, "write", full)
            cache.request_space()
        assert request.stat().st_size > 0, "its page stays, which another would take"
        assert cache.space_is_requested()
        cache.request_space()
    assert cache.space_is_requested()
    request.unlink()
    monkeypatch.setattr(os, "open", full)
    cache.request_space()
    assert not request.exists()


def test_another_fault_of_the_file_system_is_no_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="Input/output error"):
        ModelCache(tmp_path, 100).acquire("a", 70, never)
    assert files(tmp_path) == []


def test_free_space_and_our_own_files_are_available(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "a").write_bytes(bytes(2**20))
    assert available_bytes(tmp_path, ours) - available_bytes(tmp_path, tmp_path / "none") >= 2**19


def test_shared_memory_is_the_default_if_it_is_large_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_cache_folder(2**60).path == tmp_path / f"tidepool-{os.geteuid()}"
    shared = Path("/dev/shm") / f"tidepool-models-{os.geteuid()}"
    folder = default_cache_folder(1).path
    assert folder == (shared if os.path.ismount("/dev/shm") else tmp_path / f"tidepool-{os.geteuid()}")


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans()), max_size=8),
    st.integers(1, 20),
    st.integers(0, 40),
)
def test_evictions_are_by_last_use_and_no_more_than_needed(
    rows: list[tuple[int, int, bool]], needed: int, capacity: int
) -> None:
    present = [
        CachedFile(name=str(number), size_bytes=size, used_s=float(used), held=held)
        for number, (size, used, held) in enumerate(rows)
    ]
    chosen = choose_cache_evictions(present, needed, capacity)
    if chosen is None:
        assert sum(file.size_bytes for file in present if file.held) + needed > capacity
        return
    gone = [file for file in present if file.name in chosen]
    left = [file for file in present if file.name not in chosen]
    assert not any(file.held for file in gone)
    used = sum(file.size_bytes for file in left) + needed
    assert used <= capacity
    if gone:
        latest = max(gone, key=lambda file: (file.used_s, file.name))
        assert used + latest.size_bytes > capacity, "the last one had to be evicted"
        assert all((file.used_s, file.name) > (latest.used_s, latest.name) for file in left if not file.held)
