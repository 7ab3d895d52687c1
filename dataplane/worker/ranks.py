"""`python -m dataplane.worker.ranks FD`: the ranks of one model on a host that is not the head of its slot.

A follower (`dataplane.follower`) starts it with two commands, Configure and Load, and hears Loaded when the ranks of
all hosts have loaded their parts, or LoadFailed when they cannot, or have ended. When the socket closes, the process
ends with its ranks, whatever they are doing.
"""

import socket
import sys
import threading
from io import BufferedReader

from dataplane.protocol.errors import DataplaneError
from dataplane.runtime.logs import LogSettings, logging_to_stderr
from dataplane.worker.engines import prepare_vllm, vllm_settings
from dataplane.worker.frames import Configure, Load, Loaded, LoadFailed, Report, encode_frame, read_command
from dataplane.worker.main import end_with_ranks


def main() -> None:
    """Serve the socket whose descriptor is the one argument."""
    with logging_to_stderr(LogSettings()), socket.socket(fileno=int(sys.argv[1])) as connection:
        stream = connection.makefile("rb")
        configure, load = read_command(stream), read_command(stream)
        if not isinstance(configure, Configure) or not isinstance(load, Load):
            return
        threading.Thread(target=_end_when_closed, args=(stream,), name="commands", daemon=True).start()

        def send(report: Report) -> None:
            connection.sendall(encode_frame(report))

        try:
            prepare_vllm(configure)
            from dataplane.engines.vllm.ranks import run_ranks  # noqa: PLC0415

            run_ranks(
                load.model,
                vllm_settings(configure),
                loaded=lambda: send(Loaded(instance_id=load.instance_id, serial=load.serial)),
            )
        except Exception as error:  # whatever vLLM or a checkpoint does, the head is told of it
            text = error.message if isinstance(error, DataplaneError) else f"{type(error).__name__}: {error}"
            send(LoadFailed(instance_id=load.instance_id, serial=load.serial, error=text))


def _end_when_closed(stream: BufferedReader) -> None:
    stream.read(1)
    end_with_ranks(0)


if __name__ == "__main__":
    main()
