"""`python -m dataplane.engines.torch.ranks.follower FD`: a rank that follows rank 0.

It has the memory of a rank and no bookkeeping of it: it copies, binds and runs what it is told, in the order of the
commands, and waits for its own transfers where rank 0 has waited for its own. Whatever fails here ends the process, and
rank 0 with it. So does the end of rank 0, whatever this process is doing.
"""

import mmap
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import torch

from dataplane.engines.torch.copies.base import Copy, CopyStream, Line
from dataplane.engines.torch.copies.open import make_stream, pinned, record_event, unpinned
from dataplane.engines.torch.memory.kv_file import KvFile, host_memory
from dataplane.engines.torch.memory.models import kv_shape
from dataplane.engines.torch.model.adapters import Adapter, Factors
from dataplane.engines.torch.model.parallel import Rank
from dataplane.engines.torch.model.runner import forward_logits, forward_states
from dataplane.engines.torch.model.skeleton import Skeleton, build_skeleton
from dataplane.engines.torch.ranks.collectives import join_group
from dataplane.engines.torch.ranks.commands import (
    ADAPTED,
    ARENA,
    HELD,
    HOST_KV,
    READY,
    REPORT,
    STREAMS,
    VERSION,
    Abort,
    Adapt,
    Bind,
    Build,
    Command,
    DropAdapter,
    DropFile,
    Forget,
    Forward,
    Gate,
    Hold,
    Release,
    Setup,
    Transfer,
    model_region,
    read_command,
    region_file,
)
from dataplane.memory.events import AllOf, Event, FlagEvent
from dataplane.runtime.logs import LogSettings, logging_to_stderr

log = structlog.get_logger()

POLL_S = 0.0002


class StepAbortedError(Exception):
    """Rank 0 ended a forward pass before its end."""


@dataclass(eq=False, kw_only=True)
class FollowedModel:
    """A model of this rank. `offsets`: where its shards are in the arena; `host`: its host copy, which is being pinned
    until `held`; `copies`: transfers that read it.
    """

    skeleton: Skeleton
    offsets: dict[int, int] = field(default_factory=dict)
    host: torch.Tensor | None = None
    held: FlagEvent | None = None
    copies: list[Event] = field(default_factory=list)


class Submissions:
    """A copy stream, and those of its submissions that may still be under way, by number."""

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        self._pending: deque[tuple[int, Event]] = deque()
        self._count = 0

    def submit(self, copies: list[Copy], after: list[Event]) -> Event:
        event = self.stream.submit(copies, after)
        self._pending.append((self._count, event))
        self._count += 1
        return event

    def before(self, count: int) -> list[Event]:
        """What to wait for so that the first `count` submissions have ended: the last one of them, as a stream executes
        them in order.

        Raises:
            TransferError: one has failed.
        """
        while self._pending and self._pending[0][1].done():
            self._pending.popleft()[1].wait()
        return [event for number, event in self._pending if number < count][-1:]


class Follower:
    """Executes the commands of rank 0. `commands` gives the next one; None at the end. `report` sends bytes back; it is
    called by one thread at a time.
    """

    def __init__(self, setup: Setup, commands: Callable[[], Command | None], report: Callable[[bytes], None]) -> None:
        if setup.version != VERSION:
            raise ValueError(f"version must be {VERSION}, as this rank's, got {setup.version}")
        self._setup = setup
        self._commands = commands
        self._send = report
        self._sending = threading.Lock()
        self._dtype = torch.float32 if setup.dtype == "float32" else torch.bfloat16
        self._device = torch.device(setup.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        arena = torch.empty(setup.arena_bytes, dtype=torch.uint8, device=self._device)
        self._regions = {ARENA: arena}
        if setup.host_kv_file is None:
            self._regions[HOST_KV] = pinned(host_memory(setup.host_kv_bytes, None), self._device)
        self._files: dict[str, torch.Tensor] = {}
        self._arena = KvFile(bytes=arena, slab_bytes=setup.slab_bytes)
        self._streams = [Submissions(self._make_stream(name)) for name in STREAMS]
        self._pins, self._reports = Line("pins"), Line("reports")
        self._models: dict[int, FollowedModel] = {}
        self._arrivals: dict[int, Event] = {}
        """By offset in the arena: the last transfer of weights to there."""
        self._group = join_group(Path(setup.store), setup.rank, setup.ranks, self._device, timeout_s=setup.timeout_s)
        self._rank = Rank(index=setup.rank, count=setup.ranks, collectives=self._group)

    def run(self) -> None:
        """Obey until rank 0 is gone."""
        while (command := self._commands()) is not None:
            self._obey(command)

    def close(self) -> None:
        """End the threads, and leave the other ranks."""
        for one in self._streams:
            one.stream.close()
        self._pins.close()
        self._reports.close()
        self._group.close()

    def _make_stream(self, name: str) -> CopyStream:
        return make_stream(self._device, name, threads=self._setup.copy_threads)

    def _obey(self, command: Command) -> None:
        match command:
            case Transfer():
                self._transfer(command)
            case DropFile():
                self._files.pop(command.file, None)
            case Bind():
                model = self._models[command.model]
                model.offsets[command.shard] = command.offset_bytes
                end = command.offset_bytes + model.skeleton.shards[command.shard].size_bytes
                model.skeleton.bind_shard(command.shard, self._arena.bytes[command.offset_bytes : end])
            case Forward():
                self._forward(command)
            case Build():
                folder = Path(command.folder)
                skeleton = build_skeleton(folder, self._dtype, self._device, command.task, self._rank)
                self._models[command.model] = FollowedModel(skeleton=skeleton)
            case Hold():
                self._hold(self._models[command.model], command)
            case Release():
                self._release(command.model)
            case Forget():
                del self._models[command.model]
            case Adapt():
                self._adapt(self._models[command.model].skeleton, command)
            case DropAdapter():
                self._models[command.model].skeleton.adapters.remove(command.name)
            case Setup() | Gate() | Abort():
                raise AssertionError(f"{command} is not expected here")

    def _adapt(self, skeleton: Skeleton, command: Adapt) -> None:
        """Rank 0 waits for the answer, so that goes before the reports of transfers that are under way. The key, which
        is that of KV, is rank 0's to know.
        """
        try:
            on_device = self._read_adapter(command).to(self._device)
        except torch.OutOfMemoryError:
            self._report(ADAPTED, False)
            return
        skeleton.adapters.add(on_device, skeleton.adaptable_layers())
        self._report(ADAPTED, True)

    def _read_adapter(self, command: Adapt) -> Adapter:
        layers = {
            name: Factors(down=self._factor(down, (command.rank, -1)), up=self._factor(up, (-1, command.rank)))
            for name, (down, up) in command.layers.items()
        }
        return Adapter(name=command.name, key="", rank=command.rank, layers=layers)

    def _factor(self, sent: bytes, shape: tuple[int, int]) -> torch.Tensor:
        return torch.frombuffer(bytearray(sent), dtype=self._dtype).view(shape)

    def _transfer(self, command: Transfer) -> None:
        source, target = self._region(command.source), self._region(command.target)
        copies = [
            Copy(source[source_at : source_at + size], target[target_at : target_at + size])
            for source_at, target_at, size in command.copies
        ]
        after = [record_event(self._device), *self._passed(command.passed)]
        for stream, number in command.after:
            after += self._streams[stream].before(number + 1)
        reader = next((one for number, one in self._models.items() if model_region(number) == command.source), None)
        if reader is not None and reader.held is not None:
            after.append(reader.held)
        event = self._streams[command.stream].submit(copies, after)
        if command.reported:
            self._reports.submit(lambda: self._report_end(command, event))
        if reader is not None:
            reader.copies = [copy for copy in reader.copies if not copy.done()] + [event]
            self._arrivals[command.copies[0][1]] = event

    def _report_end(self, command: Transfer, event: Event) -> None:
        """Report a transfer once it has ended. One that failed is not reported, and ends this rank later."""
        _until_done(event)
        event.wait()
        self._report(command.stream, command.number)

    def _report(self, kind: int, value: int) -> None:
        with self._sending, suppress(ConnectionError):  # without rank 0 this rank ends
            self._send(REPORT.pack(kind, value))

    def _passed(self, passed: Iterable[int]) -> list[Event]:
        """Transfers of this rank that rank 0 has seen end, if they are still under way here."""
        return [event for one, count in zip(self._streams, passed, strict=True) for event in one.before(count)]

    def _forward(self, command: Forward) -> None:
        model = self._models[command.model]
        for event in self._passed(command.passed):
            event.wait()
        skeleton, shape = model.skeleton, kv_shape(model.skeleton.geometry, self._setup.block_tokens, self._dtype)
        skeleton.await_shard = lambda shard: self._await(model, shard, gated=command.gated)
        run = forward_logits if command.wanted == "logits" else forward_states
        try:
            run(skeleton, self._arena.view(shape, self._dtype), command.inputs)
        except StepAbortedError:
            return
        finally:
            skeleton.await_shard = None

    def _await(self, model: FollowedModel, shard: int, *, gated: bool) -> None:
        """Wait for a shard, after rank 0 has done so."""
        while gated:
            command = self._commands()
            if command is None or isinstance(command, Abort):
                raise StepAbortedError
            if isinstance(command, Gate):
                assert command.shard == shard, f"rank 0 is at shard {command.shard}, this rank at {shard}"
                break
            self._obey(command)
        self._arrivals[model.offsets[shard]].wait()

    def _hold(self, model: FollowedModel, command: Hold) -> None:
        host = self._part(mapped(command.file))
        self._report(HELD, command.number)
        model.host, model.copies = host, []
        self._regions[model_region(command.model)] = host
        model.held = self._pins.submit(lambda: _ignore(pinned(host, self._device)))

    def _release(self, number: int) -> None:
        model = self._models[number]
        host, copies = model.host, AllOf(model.copies)
        assert host is not None, f"model {number} has no host copy"
        del self._regions[model_region(number)]
        model.host, model.held, model.copies = None, None, []

        def release() -> None:
            _until_done(copies)
            unpinned(host, self._device)

        self._pins.submit(release)

    def _region(self, name: str) -> torch.Tensor:
        if name == HOST_KV and name not in self._regions:  # rank 0 has made the file by now
            assert self._setup.host_kv_file is not None
            host_kv = self._part(host_memory(0, Path(self._setup.host_kv_file)))
            self._regions[name] = pinned(host_kv, self._device)
        file = region_file(name)
        if file is None:
            return self._regions[name]
        if file not in self._files:
            self._files[file] = self._part(host_memory(0, Path(file)))
        return self._files[file]

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of memory that has one for each rank."""
        size = whole.numel() // self._setup.ranks
        return whole[self._setup.rank * size : (self._setup.rank + 1) * size]


def _ignore(_: object) -> None:
    """A task without a result."""


def _until_done(event: Event) -> None:
    """Block until it is done, which `Event.wait` does not do on a GPU."""
    while not event.done():
        time.sleep(POLL_S)


def mapped(file: str) -> torch.Tensor:
    """The bytes of a model's host copy.

    Raises:
        OSError: it cannot be mapped.
    """
    with open(file, "r+b", opener=_no_link) as opened:
        return torch.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=torch.uint8)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def follow(connection: socket.socket, *, at_end: Callable[[], None]) -> None:
    """Serve rank 0 until it is gone. A thread reads ahead, so that rank 0 never waits for this rank to read; it calls
    `at_end` when rank 0 is gone.
    """
    commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
    stream = connection.makefile("rb")

    def listen() -> None:
        with suppress(ConnectionError), stream:
            while (command := read_command(stream)) is not None:
                commands.put(command)
        commands.put(None)
        at_end()

    setup = read_command(stream)
    if setup is None:
        stream.close()
        return
    assert isinstance(setup, Setup), f"the first command must set up: {setup}"
    connection.sendall(READY)
    threading.Thread(target=listen, name="commands", daemon=True).start()
    follower = Follower(setup, commands.get, connection.sendall)
    try:
        follower.run()
    finally:
        follower.close()


def main() -> None:
    """Serve the socket whose descriptor is the one argument."""
    with logging_to_stderr(LogSettings()), socket.socket(fileno=int(sys.argv[1])) as connection:
        follow(connection, at_end=lambda: os._exit(0))


if __name__ == "__main__":
    main()
