"""A template process: renders one conversation after the other until its socket closes.

A checkpoint's author wrote the template. Here it may loop for ever, or make gigabytes of text: this process has limited
memory and no secrets, and ends by itself where the agent does not end it first.
"""

import contextlib
import resource
import signal
import socket
import sys
from io import BufferedReader

from jinja2 import TemplateSyntaxError

from dataplane.agent.templates.environment import RefusalError, compiled, free_variables
from dataplane.agent.templates.frames import (
    LENGTH,
    Command,
    Compile,
    Compiled,
    Failed,
    Rendered,
    Reply,
    decode_command,
    encode_frame,
)

MESSAGE_CHARS_MAX = 500


def main() -> None:
    """Serve the socket that the arguments name: its descriptor, seconds of one render, bytes of memory, characters of
    one text. A first reply says that it is ready.
    """
    descriptor, time_max_s, memory_bytes, chars_max = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=int(descriptor))
    stream = connection.makefile("rb")
    with contextlib.suppress(ConnectionError):
        connection.sendall(encode_frame(Compiled(variables=())))
        while (body := _read(stream)) is not None:
            signal.setitimer(signal.ITIMER_REAL, float(time_max_s))  # its signal ends the process
            reply = encode_frame(_answer(body, int(chars_max)))
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(reply)


def _read(stream: BufferedReader) -> bytes | None:
    head = stream.read(LENGTH.size)
    return stream.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else None


def _answer(body: bytes, chars_max: int) -> Reply:
    try:
        return _reply(decode_command(body), chars_max)
    except RefusalError as error:
        return Failed(kind="refused", message=str(error.message)[:MESSAGE_CHARS_MAX])
    except TemplateSyntaxError as error:
        return Failed(kind="invalid", message=f"line {error.lineno}: {error.message}"[:MESSAGE_CHARS_MAX])
    except (MemoryError, OverflowError):
        return Failed(kind="limit", message="it needs more memory than allowed")
    except RecursionError:
        return Failed(kind="limit", message="it is nested too deeply")
    except Exception as error:  # whatever the template does
        return Failed(kind="broke", message=str(error)[:MESSAGE_CHARS_MAX] or type(error).__name__)


def _reply(command: Command, chars_max: int) -> Reply:
    template = compiled(command.source)
    if isinstance(command, Compile):
        return Compiled(variables=free_variables(command.source))
    pieces, chars = [], 0
    for piece in template.generate(command.variables):
        pieces.append(piece)
        chars += len(piece)
        if chars > chars_max:
            return Failed(kind="limit", message=f"its text is longer than {chars_max} characters")
    return Rendered(text="".join(pieces))


if __name__ == "__main__":
    main()
