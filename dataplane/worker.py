"""`python -m dataplane.worker FD`: the process that drives one slot's engine, at the far end of an agent's socket.

A thread reads commands from the socket into a queue; the main loop takes them, steps the engine and sends what came
out. When the socket closes the agent is gone, and the process ends at once, whatever the engine is doing.
"""

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from io import BufferedReader

from dataplane.engine import Engine, EngineStats
from dataplane.errors import DataplaneError, ModelLoadError
from dataplane.frames import (
    Add,
    AskStats,
    Cancel,
    Command,
    Configure,
    Load,
    Loaded,
    LoadFailed,
    Outputs,
    Refused,
    Report,
    Stats,
    Unload,
    encode_frame,
    read_command,
)
from dataplane.turns.schedule import TurnSettings

STATS_EVERY_S = 0.25
ORPHAN_GRACE_S = 1.0
"""How long a step or a load may go on after the agent is gone."""


class Worker:
    """One engine and the loop that feeds it. `send` must not fail while the agent lives."""

    def __init__(self, engine: Engine, commands: "queue.Queue[Command | None]", send: Callable[[Report], None]) -> None:
        self._engine = engine
        self._commands = commands
        self._send = send
        self._loaded: set[str] = set()
        self._sent_stats: EngineStats | None = None
        self._stats_sent_s = 0.0

    def run(self) -> None:
        """Say hello with the first stats, then obey until the command queue says None."""
        self._send_stats(always=True)
        while True:
            for command in self._take_commands():
                if command is None:
                    return
                self._obey(command)
            if self._engine.has_work():
                outputs = self._engine.step()
                if outputs:
                    self._send(Outputs(outputs=tuple(outputs)))
            if time.monotonic() - self._stats_sent_s >= STATS_EVERY_S:
                self._send_stats()

    def _take_commands(self) -> list[Command | None]:
        """All commands that are there. An idle engine waits a moment for one."""
        taken: list[Command | None] = []
        try:
            if not self._engine.has_work():
                taken.append(self._commands.get(timeout=STATS_EVERY_S))
            while True:
                taken.append(self._commands.get_nowait())
        except queue.Empty:
            return taken

    def _obey(self, command: Command) -> None:
        match command:
            case Load():
                self._load(command)
            case Unload():
                self._unload(command.instance_id)
            case Add():
                self._add(command)
            case Cancel():
                self._engine.cancel(command.request_id)
            case AskStats():
                self._send_stats(always=True)
            case Configure():
                raise AssertionError("a worker is configured once, before its loop")

    def _load(self, command: Load) -> None:
        try:
            self._engine.load(command.instance_id, command.model, gpus=command.gpus)
        except Exception as error:  # whatever a checkpoint does, the slot's other models go on
            text = error.message if isinstance(error, ModelLoadError) else f"{type(error).__name__}: {error}"
            self._send(LoadFailed(instance_id=command.instance_id, serial=command.serial, error=text))
            return
        self._loaded.add(command.instance_id)
        self._send_stats(always=True)
        self._send(Loaded(instance_id=command.instance_id, serial=command.serial))

    def _unload(self, instance_id: str) -> None:
        if instance_id in self._loaded:
            self._loaded.remove(instance_id)
            self._engine.unload(instance_id)
        self._send_stats(always=True)

    def _add(self, command: Add) -> None:
        try:
            self._engine.add(command.request)
        except DataplaneError as error:
            self._send(
                Refused(
                    request_id=command.request.request_id,
                    status=error.status,
                    code=error.code,
                    message=error.message,
                    param=error.param,
                )
            )

    def _send_stats(self, *, always: bool = False) -> None:
        stats = self._engine.stats()
        self._stats_sent_s = time.monotonic()
        if always or stats != self._sent_stats:
            self._sent_stats = stats
            self._send(Stats(stats=stats))


def make_engine(configure: Configure) -> Engine:
    """The engine that an agent asks for. Torch is imported here and nowhere else."""
    turn = TurnSettings(turn_time_s=configure.turn_time_s)
    if configure.engine == "torch":
        from dataplane.engines.torch.engine import TorchEngine  # noqa: PLC0415
        from dataplane.engines.torch.settings import TorchEngineSettings  # noqa: PLC0415

        return TorchEngine(
            TorchEngineSettings(
                device=configure.device,
                dtype=configure.dtype,
                weights_bytes=configure.weights_bytes,
                kv_bytes_per_gpu=configure.kv_bytes_per_gpu,
                batch_max=configure.batch_max,
                turns=turn,
            ),
            time.monotonic,
        )
    from dataplane.engines.replay import ReplayEngine, ReplaySettings  # noqa: PLC0415
    from dataplane.profile import load_gpu_profile  # noqa: PLC0415

    assert configure.profile is not None, "a replay needs a profile; the agent's settings check that"
    settings = ReplaySettings(
        profile=load_gpu_profile(configure.profile),
        weights_bytes=configure.weights_bytes,
        kv_bytes_per_gpu=configure.kv_bytes_per_gpu,
        batch_max=configure.batch_max,
        speed=configure.replay_speed,
        mean_tokens=configure.replay_mean_tokens,
        turn=turn,
    )
    return ReplayEngine(settings, time.monotonic, time.sleep)


def main() -> None:
    """Take the socket whose number is the one argument, and serve it to its end."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        stream = connection.makefile("rb")
        configure = read_command(stream)
        if configure is None:
            return
        assert isinstance(configure, Configure), f"the first command must configure: {configure}"
        commands: queue.Queue[Command | None] = queue.Queue()

        def read() -> None:
            while (command := _read_or_none(stream)) is not None:
                commands.put(command)
            commands.put(None)
            time.sleep(ORPHAN_GRACE_S)
            os._exit(0)

        threading.Thread(target=read, name="commands", daemon=True).start()
        worker = Worker(make_engine(configure), commands, lambda report: connection.sendall(encode_frame(report)))
        try:
            worker.run()
        except (BrokenPipeError, ConnectionResetError):
            return


def _read_or_none(stream: BufferedReader) -> Command | None:
    """The next command; a connection cut off mid-frame reads as its end."""
    try:
        return read_command(stream)
    except ConnectionResetError:
        return None


if __name__ == "__main__":
    main()
