"""`python -m dataplane.worker.main FD`: the worker process, which drives one engine by the commands of an agent.

A thread reads commands from the socket into a queue; the main loop handles them, steps the engine and sends outputs.
The slow part of a load runs on another thread, one load after the other, while the engine continues, and so does the
compilation of a request's constraint, after which the engine gets the request. A load that finds
too little free host memory is queued again, and fails after `host_wait_max_s`. When the socket closes, the agent is
gone, and the process ends, whatever the engine is doing. It also ends when it cannot read a command, since it cannot
find the frames after it.
"""

import multiprocessing
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from typing import NoReturn

import structlog
from msgspec.structs import replace

from dataplane.engines.interface import Engine, EngineStats
from dataplane.memory.model_cache import HostMemoryError
from dataplane.protocol.errors import DataplaneError, DeviceLostError, ModelLoadError
from dataplane.runtime.logs import LogSettings, logging_to_stderr
from dataplane.runtime.tracing import RequestSpans, start_tracing
from dataplane.worker.engines import make_engine
from dataplane.worker.frames import (
    Add,
    Cancel,
    Command,
    Configure,
    FrameError,
    Load,
    Loaded,
    LoadFailed,
    LoadStage,
    Outputs,
    Refused,
    Release,
    Report,
    Stats,
    Unload,
    encode_frame,
    read_command,
)

log = structlog.get_logger()

STATS_EVERY_S = 0.25
STATS_REPEAT_S = 2.0
"""How often statistics are sent although they are the same, so that the agent sees that the main loop runs."""
PREPARE_RETRY_S = 0.25
"""Delay before a load that found too little host memory is queued again."""
COMMANDS_MAX = 2048
"""Commands that may wait for the main loop: a few for each request of an agent's default `queue_max`."""
FULL_PAUSE_MS = 1
ORPHAN_GRACE_S = 1.0
"""How long a step or a load may continue after the agent is gone."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Queued by the loading thread among the commands: the slow part of a load has ended."""

    load: Load
    error: BaseException | None


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Queued by the compiling thread among the commands: the constraint of a request is compiled, or cannot be."""

    add: Add
    error: BaseException | None


@dataclass(eq=False, kw_only=True)
class Loading:
    """A load in progress. `retry_s`: when it is queued again, if host memory is too little since `short_since_s`."""

    load: Load
    future: Future[None] | None = None
    short_since_s: float | None = None
    retry_s: float = 0.0


class Worker:
    """One engine and its loop. `send` must not fail while the agent lives; loads call it on their thread, too."""

    def __init__(
        self,
        engine: Engine,
        commands: "queue.Queue[Command | Prepared | Compiled | None]",
        send: Callable[[Report], None],
        *,
        host_wait_max_s: float,
        prepare_retry_s: float = PREPARE_RETRY_S,
    ) -> None:
        self._engine = engine
        self._commands = commands
        self._send = send
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
        self._compiling: dict[str, Add] = {}
        """Requests whose constraint is being compiled, by id."""
        self._host_wait_max_s = host_wait_max_s
        self._prepare_retry_s = prepare_retry_s
        self._loading: dict[str, Loading] = {}
        self._loaded: dict[str, int] = {}
        """The serial of the Load, by instance."""
        self._spans = RequestSpans()
        self._sent_stats: EngineStats | None = None
        self._stats_made_s = self._stats_sent_s = 0.0

    def run(self) -> None:
        """Report the first statistics, which tell that the engine is ready; then handle commands until None."""
        self._send_stats(always=True)
        while True:
            for command in self._take_commands():
                if command is None:
                    self._loader.shutdown(wait=False, cancel_futures=True)
                    self._compiler.shutdown(wait=False, cancel_futures=True)
                    return
                self._handle(command)
            self._retry_loads()
            self._step()
            if time.monotonic() - self._stats_made_s >= STATS_EVERY_S:
                self._send_stats()

    def _take_commands(self) -> list[Command | Prepared | Compiled | None]:
        """All queued commands. An idle engine waits for one for `STATS_EVERY_S`."""
        taken: list[Command | Prepared | Compiled | None] = []
        try:
            if not self._engine.has_work():
                taken.append(self._commands.get(timeout=STATS_EVERY_S))
            while True:
                taken.append(self._commands.get_nowait())
        except queue.Empty:
            return taken

    def _step(self) -> None:
        """Run one engine step. Idle steps finish pending transfers and release host memory to other workers."""
        outputs = self._engine.step()
        if outputs:
            self._send(Outputs(outputs=tuple(outputs)))
            self._spans.record(outputs)

    def _handle(self, command: Command | Prepared | Compiled) -> None:
        match command:
            case Load():
                self._loading[command.instance_id] = Loading(load=command)
                self._prepare(self._loading[command.instance_id])
            case Prepared():
                self._load(command)
            case Unload():
                self._unload(command.instance_id)
            case Add(request=request) if request.constraint is not None:
                self._compile(command)
            case Add():
                self._add(command)
            case Compiled():
                self._add_compiled(command)
            case Cancel():
                self._compiling.pop(command.request_id, None)
                self._engine.cancel(command.request_id)
                self._spans.end(command.request_id)
            case Release():
                self._engine.release(command.request_id)
            case Configure():
                raise AssertionError("a worker is configured once, before its loop")

    def _prepare(self, loading: Loading) -> None:
        """Queue the slow part of a load; its end is queued as a command."""
        load = loading.load

        def prepare() -> None:
            self._send(LoadStage(instance_id=load.instance_id, serial=load.serial, begun=True))
            self._engine.prepare(load.model)

        def note_end(future: Future[None]) -> None:
            if not future.cancelled():
                self._commands.put(Prepared(load=load, error=future.exception()))

        loading.future = self._loader.submit(prepare)
        loading.future.add_done_callback(note_end)

    def _retry_loads(self) -> None:
        for loading in self._loading.values():
            if loading.future is None and time.monotonic() >= loading.retry_s:
                self._prepare(loading)

    def _load(self, prepared: Prepared) -> None:
        load = prepared.load
        loading = self._loading.get(load.instance_id)
        if loading is None or loading.load is not load:
            self._engine.forget(load.model)
            return
        try:
            if isinstance(prepared.error, HostMemoryError):
                self._put_off(loading, prepared.error)
                return
            if prepared.error is not None:
                raise prepared.error
            if not self._engine.is_prepared(load.model):  # it was unloaded meanwhile with another instance
                self._prepare(loading)
                return
            self._engine.load(load.instance_id, load.model, gpus=load.gpus)
        except DeviceLostError:
            raise
        except Exception as error:  # whatever a checkpoint does, the worker's other models are served
            del self._loading[load.instance_id]
            self._engine.forget(load.model)
            text = error.message if isinstance(error, ModelLoadError) else f"{type(error).__name__}: {error}"
            self._send(LoadFailed(instance_id=load.instance_id, serial=load.serial, error=text))
            return
        del self._loading[load.instance_id]
        self._loaded[load.instance_id] = load.serial
        self._send_stats(always=True)
        self._send(Loaded(instance_id=load.instance_id, serial=load.serial))

    def _put_off(self, loading: Loading, error: HostMemoryError) -> None:
        """Let a load wait for host memory.

        Raises:
            ModelLoadError: it has waited long enough.
        """
        now_s = time.monotonic()
        if loading.short_since_s is None:
            loading.short_since_s = now_s
        if now_s - loading.short_since_s >= self._host_wait_max_s:
            limit = f"host_wait_max_s={self._host_wait_max_s:g}"
            raise ModelLoadError(f"too little free host memory for longer than {limit}: {error.message}") from error
        loading.future, loading.retry_s = None, now_s + self._prepare_retry_s
        load = loading.load
        self._send(LoadStage(instance_id=load.instance_id, serial=load.serial, begun=False))

    def _unload(self, instance_id: str) -> None:
        loading = self._loading.pop(instance_id, None)
        if loading is not None:
            if loading.future is not None:
                loading.future.cancel()
            cancelled = "unloaded while it was loading"
            self._send(LoadFailed(instance_id=instance_id, serial=loading.load.serial, error=cancelled))
        if self._loaded.pop(instance_id, None) is not None:
            self._engine.unload(instance_id)
        self._send_stats(always=True)

    def _compile(self, command: Add) -> None:
        """Compile a request's constraint on the other thread; its end is queued as a command."""
        self._compiling[command.request.request_id] = command

        def note_end(future: Future[None]) -> None:
            if not future.cancelled():
                self._commands.put(Compiled(add=command, error=future.exception()))

        self._compiler.submit(self._engine.compile, command.request).add_done_callback(note_end)

    def _add_compiled(self, compiled: Compiled) -> None:
        """Add a request whose constraint is compiled, unless it was cancelled since."""
        request_id = compiled.add.request.request_id
        if self._compiling.get(request_id) is not compiled.add:
            return
        del self._compiling[request_id]
        if compiled.error is None:
            self._add(compiled.add)
        elif isinstance(compiled.error, DataplaneError):
            self._refuse(request_id, compiled.error)
        else:
            raise compiled.error

    def _add(self, command: Add) -> None:
        try:
            self._engine.add(command.request)
            self._spans.begin(command.request)
        except DataplaneError as error:
            self._refuse(command.request.request_id, error)

    def _refuse(self, request_id: str, error: DataplaneError) -> None:
        refused = Refused(
            request_id=request_id, status=error.status, code=error.code, message=error.message, param=error.param
        )
        self._send(refused)

    def _send_stats(self, *, always: bool = False) -> None:
        stats = self._engine.stats()
        if stats.failed:
            self._unload_failed(stats.failed)
            stats = self._engine.stats()
        self._stats_made_s = time.monotonic()
        always = always or self._stats_made_s - self._stats_sent_s >= STATS_REPEAT_S
        if always or _without_time(stats) != self._sent_stats:
            self._sent_stats, self._stats_sent_s = _without_time(stats), self._stats_made_s
            self._send(Stats(stats=stats))

    def _unload_failed(self, failed: Mapping[str, str]) -> None:
        """Unload instances that can answer nothing any more, so that they are loaded anew."""
        for instance_id, error in failed.items():
            serial = self._loaded.pop(instance_id)
            self._engine.unload(instance_id)
            self._send(LoadFailed(instance_id=instance_id, serial=serial, error=error))


def _without_time(stats: EngineStats) -> EngineStats:
    """The statistics without their time, to compare them."""
    return stats if stats.pool is None else replace(stats, pool=replace(stats.pool, now_s=0.0))


def main() -> None:
    """Serve the socket whose descriptor is the one argument."""
    start_tracing("tidepool-worker")
    with logging_to_stderr(LogSettings()), socket.socket(fileno=int(sys.argv[1])) as connection:
        stream = connection.makefile("rb")
        configure = read_command(stream)
        if configure is None:
            return
        assert isinstance(configure, Configure), f"the first command must configure: {configure}"
        commands: queue.Queue[Command | Prepared | Compiled | None] = queue.Queue()

        threading.Thread(target=listen, args=(connection, stream, commands), name="commands", daemon=True).start()
        worker = Worker(
            make_engine(configure),
            commands,
            sender(connection),
            host_wait_max_s=configure.host_wait_max_s,
        )
        try:
            worker.run()
        except (BrokenPipeError, ConnectionResetError):
            return


def sender(connection: socket.socket) -> Callable[[Report], None]:
    """Sends whole frames, on any thread."""
    lock = threading.Lock()

    def send(report: Report) -> None:
        with lock:
            connection.sendall(encode_frame(report))

    return send


def end_with_ranks(status: int) -> NoReturn:
    """End this process, and the processes of vLLM's ranks first: one that waits for a rank on another host would not
    notice for many minutes.
    """
    for rank in multiprocessing.active_children():
        rank.kill()
    os._exit(status)


def listen(
    connection: socket.socket,
    stream: BufferedReader,
    commands: "queue.Queue[Command | Prepared | Compiled | None]",
    *,
    grace_s: float = ORPHAN_GRACE_S,
    end_process: Callable[[int], NoReturn] = end_with_ranks,
) -> NoReturn:
    """Queue the agent's commands until the socket closes; then end the process. While `COMMANDS_MAX` wait for the main
    loop, which may be loading, none is read: the agent keeps further commands, or refuses their requests.
    """
    gone = select.poll()
    gone.register(connection, select.POLLRDHUP)
    try:
        while (command := _read_or_none(stream)) is not None:
            commands.put(command)
            while commands.qsize() >= COMMANDS_MAX and not gone.poll(FULL_PAUSE_MS):
                pass
    except (FrameError, OSError) as error:
        log.error("a command of the agent cannot be read; the worker ends", error=f"{type(error).__name__}: {error}")
        end_process(1)
    commands.put(None)
    time.sleep(grace_s)
    end_process(0)


def _read_or_none(stream: BufferedReader) -> Command | None:
    """The next command; a connection cut off mid-frame reads as its end."""
    try:
        return read_command(stream)
    except ConnectionResetError:
        return None


if __name__ == "__main__":
    main()
