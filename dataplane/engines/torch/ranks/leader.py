"""Rank 0 of a slot of several GPUs: its engine decides as on one GPU, and this lets the other ranks do the same.

The engine is unchanged: its copy streams, the shards that are bound and the forward passes are repeated on the other
ranks, each on its own part. A rank that fails ends, and with it the worker process: the agent starts a new one.
"""

import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.model.adapters import Adapter
from dataplane.engines.torch.model.inputs import ChunkInput, Wanted
from dataplane.engines.torch.model.parallel import Rank
from dataplane.engines.torch.model.skeleton import Skeleton
from dataplane.engines.torch.ranks.commands import (
    ADAPTED,
    HELD,
    HOST_KV,
    REPORT,
    STREAMS,
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
    Transfer,
    file_region,
    model_region,
    region_file,
    send_command,
)
from dataplane.memory.events import PASSED, AllOf, Event, FlagEvent, Settled, TransferError
from dataplane.protocol.errors import DeviceLostError, ModelLoadError


class Regions:
    """Where in this process's memory the regions of commands begin. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: dict[str, torch.Tensor] = {}

    def add(self, name: str, memory: torch.Tensor) -> None:
        with self._lock:
            self._memory.pop(name, None)
            self._memory[name] = memory

    def remove(self, name: str) -> None:
        with self._lock:
            self._memory.pop(name, None)

    def find(self, tensor: torch.Tensor) -> tuple[str, int]:
        """The region that the tensor is in, and the region's address."""
        address = tensor.data_ptr()
        with self._lock:
            for name, memory in reversed(self._memory.items()):
                if memory.data_ptr() <= address and address + tensor.nbytes <= memory.data_ptr() + memory.nbytes:
                    return name, memory.data_ptr()
        raise AssertionError(f"{tensor.nbytes} bytes at {address:#x} are in no region that the ranks share")


class Leader:
    """Sends the commands of rank 0. `send` may be called on any thread, streams by the engine's only. `exports`:
    whether other slots read the host KV memory.
    """

    def __init__(
        self, rank: Rank, connections: Sequence[socket.socket], end: Callable[[], None], *, exports: bool
    ) -> None:
        """`end` shuts the connections down and waits for the end of the other ranks."""
        self.rank = rank
        self.regions = Regions()
        self._exports = exports
        self._connections = tuple(connections)
        self._adapted: tuple[queue.SimpleQueue[bool | None], ...] = tuple(queue.SimpleQueue() for _ in connections)
        """By other rank: whether it serves the last adapter that was sent; None: it is gone."""
        self._readers = [
            threading.Thread(target=self._read_reports, args=(connection, number), name="reports", daemon=True)
            for number, connection in enumerate(connections)
        ]
        for reader in self._readers:
            reader.start()
        self._end = end
        self._lock = threading.Lock()
        self._streams: dict[str, MirroredStream] = {}
        self._models = 0
        self._holds = 0
        self._mapped: dict[int, tuple[FlagEvent, ...]] = {}
        """By `Hold` that not all ranks have reported: an event for each other rank."""

    def stream(self, name: str, inner: CopyStream) -> "MirroredStream":
        """A stream whose copies all ranks make."""
        self._streams[name] = MirroredStream(self, STREAMS.index(name), inner)
        return self._streams[name]

    def note_file(self, file: str, memory: torch.Tensor) -> None:
        """KV of another slot is read from a file."""
        self.regions.add(file_region(file), memory)

    def drop_file(self, file: str) -> None:
        """The other slot has ended, and no transfer reads the file any more."""
        self.regions.remove(file_region(file))
        self.send(DropFile(file=file))

    def build(self, skeleton: Skeleton, folder: Path) -> "ModelMirror":
        """Let the other ranks build a model, too."""
        with self._lock:
            self._models += 1
            number = self._models
        self.send(Build(model=number, folder=str(folder), task=skeleton.task))
        return ModelMirror(self, number, skeleton)

    def hold(self, model: int, file: Path) -> Event:
        """Let the other ranks map a model's host copy. The event is done when all of them have: until then the file
        must stay where it is.
        """
        mapped = tuple(FlagEvent() for _ in self._connections)
        with self._lock:
            number, self._holds = self._holds, self._holds + 1
            pending = {known: events for known, events in self._mapped.items() if not AllOf(events).done()}
            self._mapped = {**pending, number: mapped}
        self.send(Hold(model=model, number=number, file=str(file)))
        return AllOf(mapped)

    def send(self, command: Command) -> None:
        """Send a command to all other ranks.

        Raises:
            DeviceLostError: one is gone, or has not read its commands for the timeout.
        """
        self.send_each([command] * len(self._connections))

    def send_each(self, commands: Sequence[Command]) -> None:
        """As `send`, with a command for each of the other ranks."""
        with self._lock:
            for number, (connection, command) in enumerate(zip(self._connections, commands, strict=True), start=1):
                try:
                    send_command(connection, command)
                except OSError as error:
                    raise DeviceLostError(f"rank {number} does not read its commands: {error}") from error

    def adapt(self, commands: Sequence[Adapt]) -> tuple[int, ...]:
        """Send an adapter, a command for each of the other ranks; by the engine's thread. Returns the ranks without
        memory for it.

        Raises:
            DeviceLostError: as `send`, or a rank has not answered for the timeout.
        """
        self.send_each(commands)
        without = []
        for number, (connection, answers) in enumerate(zip(self._connections, self._adapted, strict=True), start=1):
            try:
                answer = answers.get(timeout=connection.gettimeout())
            except queue.Empty:
                answer = None
            if answer is None:
                raise DeviceLostError(f"rank {number} does not say whether it has an adapter")
            if not answer:
                without.append(number)
        return tuple(without)

    def is_shared(self, region: str) -> bool:
        """Whether other slots read the region, or this one reads it from another."""
        return region_file(region) is not None or (region == HOST_KV and self._exports)

    @property
    def passed(self) -> tuple[int, ...]:
        """How many submissions of each stream have ended."""
        return tuple(self._streams[name].passed if name in self._streams else 0 for name in STREAMS)

    def references(self, after: Sequence[Event]) -> tuple[tuple[int, int], ...]:
        """The submissions among some events that have not ended."""
        plain = [inner for event in after for inner in _unwrapped(event)]
        return tuple(found for stream in self._streams.values() for found in stream.numbers_of(plain))

    def close(self) -> None:
        """End the other ranks."""
        try:
            self._end()
        finally:
            for reader in self._readers:
                reader.join()
            for connection in self._connections:
                connection.close()

    def _read_reports(self, connection: socket.socket, number: int) -> None:
        """Note what another rank reports, until it is gone."""
        ready = select.poll()
        ready.register(connection, select.POLLIN)
        received = b""
        with suppress(ConnectionError):
            while ready.poll() and (more := connection.recv(4096)):
                received += more
                whole = len(received) // REPORT.size * REPORT.size
                for kind, value in REPORT.iter_unpack(received[:whole]):
                    if kind == ADAPTED:
                        self._adapted[number].put(bool(value))
                    elif kind == HELD:
                        self._mapped[value][number].finish()
                    else:
                        self._streams[STREAMS[kind]].reported(value, number)
                received = received[whole:]
        self._adapted[number].put(None)


class MirroredStream:
    """A copy stream whose submissions are sent to the other ranks. Meets `CopyStream`."""

    def __init__(self, leader: Leader, index: int, inner: CopyStream) -> None:
        self._leader = leader
        self._index = index
        self._inner = inner
        self._submitted = 0
        self._ended = 0
        self._pending: dict[int, Event] = {}
        self._reports: dict[int, tuple[FlagEvent, ...]] = {}
        """By submission whose end is reported: an event for each other rank."""

    @property
    def passed(self) -> int:
        """Submissions up to the last one that has ended: with those before it, if they end out of order."""
        ended = [number for number, event in self._pending.items() if event.done()]
        for number in ended:
            del self._pending[number]
            self._reports.pop(number, None)
            self._ended = max(self._ended, number + 1)
        return self._ended

    def numbers_of(self, events: Sequence[Event]) -> list[tuple[int, int]]:
        """Which of its submissions are among some events, as (stream, number)."""
        return [(self._index, number) for number, mine in self._pending.items() if any(mine is one for one in events)]

    def reported(self, number: int, rank: int) -> None:
        """A submission has ended on another rank, by its place among those."""
        self._reports[number][rank].finish()

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        leader = self._leader
        source, source_address = leader.regions.find(copies[0].source)
        target, target_address = leader.regions.find(copies[0].target)
        passed = leader.passed  # first, so that `after` names none of them
        number, is_shared = self._submitted, leader.is_shared(source) or leader.is_shared(target)
        command = Transfer(
            stream=self._index,
            number=number,
            source=source,
            target=target,
            copies=tuple(
                (one.source.data_ptr() - source_address, one.target.data_ptr() - target_address, one.source.nbytes)
                for one in copies
            ),
            after=leader.references(after),
            reported=is_shared,
            passed=passed,
        )
        event = self._inner.submit(copies, after)
        if is_shared:
            self._reports[number] = tuple(FlagEvent() for _ in range(leader.rank.count - 1))
            event = AllOf((event, *self._reports[number]))
        self._pending[number] = event
        self._submitted += 1
        leader.send(command)
        return event

    def close(self) -> None:
        self._inner.close()


class ModelMirror:
    """A model that all ranks have. Meets `dataplane.engines.torch.model.skeleton.Mirror`."""

    def __init__(self, leader: Leader, number: int, skeleton: Skeleton) -> None:
        self._leader = leader
        self._number = number
        self._skeleton = skeleton
        self._lock = threading.RLock()
        self._is_held = self._is_forgotten = False

    def hold(self, host: torch.Tensor, file: Path) -> Event:
        """See `Mirror`. A model may be forgotten while another thread reads it: its copy is then of no use."""
        with self._lock:
            if self._is_forgotten:
                return PASSED
            self._is_held = True
            self._leader.regions.add(model_region(self._number), host)
            return self._leader.hold(self._number, file)

    def release(self) -> None:
        with self._lock:
            if self._is_held:
                self._is_held = False
                self._leader.regions.remove(model_region(self._number))
                self._leader.send(Release(model=self._number))

    def forget(self) -> None:
        with self._lock:
            self.release()
            self._is_forgotten = True
            self._leader.send(Forget(model=self._number))

    def bound(self, shard: int, buffer: torch.Tensor) -> None:
        _, address = self._leader.regions.find(buffer)
        self._leader.send(Bind(model=self._number, shard=shard, offset_bytes=buffer.data_ptr() - address))

    def adapt(self, parts: Sequence[Adapter]) -> None:
        without = self._leader.adapt(
            [
                Adapt(
                    model=self._number,
                    name=part.name,
                    rank=part.rank,
                    layers={name: (_bytes(one.down), _bytes(one.up)) for name, one in part.layers.items()},
                )
                for part in parts
            ]
        )
        if without:
            part = parts[0]
            self.drop_adapter(part.name)
            ranks = ", ".join(map(str, without))
            raise ModelLoadError(f"{part.name}: no memory for {part.size_bytes} bytes on rank {ranks}")

    def drop_adapter(self, name: str) -> None:
        self._leader.send(DropAdapter(model=self._number, name=name))

    @contextmanager
    def step(self, wanted: Wanted, inputs: Sequence[ChunkInput]) -> Iterator[None]:
        """Let the other ranks run a forward pass, while this one does.

        Raises:
            DeviceLostError: another exception than a gate's TransferError left it: some ranks may be in a collective
                operation, which only their end can end.
        """
        leader, gate = self._leader, self._skeleton.await_shard
        is_gated = gate is not None
        command = Forward(model=self._number, wanted=wanted, inputs=tuple(inputs), gated=is_gated, passed=leader.passed)
        leader.send(command)
        if gate is not None:
            self._skeleton.await_shard = partial(self._open_gate, gate)
        try:
            yield
        except (TransferError, DeviceLostError):
            raise
        except Exception as error:
            raise DeviceLostError(f"a forward pass of {leader.rank.count} ranks failed: {error}") from error
        finally:
            self._skeleton.await_shard = gate

    def _open_gate(self, gate: Callable[[int], None], shard: int) -> None:
        try:
            gate(shard)
        except TransferError:
            self._leader.send(Abort())
            raise
        self._leader.send(Gate(shard=shard))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _unwrapped(event: Event) -> Iterator[Event]:
    """The event, and those that it stands for."""
    yield event
    for inner in (event.event,) if isinstance(event, Settled) else event.events if isinstance(event, AllOf) else ():
        yield from _unwrapped(inner)
