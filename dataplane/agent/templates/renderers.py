"""The agent's side of template processes: a few of them, started when needed, ended when a template takes too long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Self
from weakref import WeakValueDictionary

import structlog

from dataplane.agent.child_process import ChildProcess
from dataplane.agent.templates.frames import (
    LENGTH,
    Command,
    Compile,
    Compiled,
    Failed,
    Render,
    Rendered,
    Reply,
    decode_reply,
    encode_frame,
    is_encodable,
)
from dataplane.protocol.errors import BadRequestError, DataplaneError, OverloadedError

log = structlog.get_logger()

MEMORY_BYTES = 512 * 2**20
"""Address space of one process: the conversation, the template and its text."""
CHARS_MAX = 16 * 2**20
"""Of one rendered text."""
START_MAX_S = 30.0
"""Until a new process has said that it is ready."""


class ChatTemplateError(DataplaneError):
    """The chat template is at fault, or broke its limits: no instance of the model can do better."""

    status = 400
    code = "chat_template_failed"


class InvalidTemplateError(ChatTemplateError):
    """The source is no template."""


class BrokenTemplateError(BadRequestError):
    """The template failed with the given variables, by which it may be at fault or they."""


class _Process(ChildProcess):
    """One template process."""

    @classmethod
    async def ready(cls, time_max_s: float) -> Self:
        """A process that has said that it is ready.

        Raises:
            OSError: the machine has no process, descriptor or memory for one, or it does not come up.
            EOFError: it ended at once.
        """
        limits = [str(limit) for limit in (2 * time_max_s, MEMORY_BYTES, CHARS_MAX)]
        started = await cls.start("dataplane.agent.templates.process", *limits, buffer_bytes=CHARS_MAX)
        try:
            async with asyncio.timeout(START_MAX_S):
                await started.reply()
        except BaseException:
            await asyncio.shield(started.kill())
            raise
        return started

    async def call(self, frame: bytes) -> Reply:
        """The reply to a command, given as a frame.

        Raises:
            EOFError, ConnectionError: the process has ended.
        """
        self.writer.write(frame)
        return await self.reply()

    async def reply(self) -> Reply:
        """The next reply."""
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        return decode_reply(await self.reader.readexactly(length))


_FIELDS = {"messages": "messages", "tools": "tools", "xml_tools": "tools"}
"""Fields of requests whose values a template gets under these names; others are in `chat_template_kwargs`."""


class TemplateRenderers:
    """Renders templates in at most `processes_max` processes. A template renders one conversation at a time, so that
    one that takes long holds up its own model. `close` ends the processes.
    """

    def __init__(self, *, processes_max: int, time_max_s: float) -> None:
        self._time_max_s = time_max_s
        self._free = asyncio.Semaphore(processes_max)
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._idle: list[_Process] = []
        self._endings: set[asyncio.Task[None]] = set()

    async def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text of a template.

        Raises:
            BadRequestError: the template refuses these variables.
            BrokenTemplateError: it failed with them.
            ChatTemplateError: it is no template, takes too long, or makes too much text.
            OverloadedError: other conversations took so long that this one had no turn.
        """
        reply = await self._call(Render(source=source, variables=dict(variables)))
        if isinstance(reply, Rendered):
            return reply.text
        raise _error(reply)

    async def variables(self, source: str) -> frozenset[str]:
        """The names that a template reads and does not define.

        Raises:
            ChatTemplateError: it is no template, or compiling it breaks the limits.
            OverloadedError: other templates took so long that this one had no turn.
        """
        reply = await self._call(Compile(source=source))
        if isinstance(reply, Compiled):
            return frozenset(reply.variables)
        raise _error(reply)

    async def close(self) -> None:
        """End the processes."""
        while self._idle:
            self._end(self._idle.pop())
        await asyncio.gather(*self._endings)

    async def _call(self, command: Command) -> Reply:
        frame = _frame(command)
        busy = self._busy.setdefault(command.source, asyncio.Lock())
        async with self._turn(busy.acquire, busy.release), self._turn(self._free.acquire, self._free.release):
            return await self._in_process(frame)

    @contextlib.asynccontextmanager
    async def _turn(self, acquire: Callable[[], Awaitable[bool]], release: Callable[[], None]) -> AsyncIterator[None]:
        """Wait until other conversations have been rendered."""
        try:
            async with asyncio.timeout(self._time_max_s):
                await acquire()
        except TimeoutError:
            raise OverloadedError("other conversations take long to render; try again") from None
        try:
            yield
        finally:
            release()

    async def _in_process(self, frame: bytes) -> Reply:
        process = self._idle.pop() if self._idle else await self._start()
        try:
            async with asyncio.timeout(self._time_max_s):
                reply = await process.call(frame)
        except TimeoutError:
            self._end(process)
            log.warning("chat template took too long", time_max_s=self._time_max_s)
            raise ChatTemplateError(
                f"the model's chat template took over {self._time_max_s:g} s with this conversation", param="messages"
            ) from None
        except (EOFError, ConnectionError):
            self._end(process)
            log.warning("template process ended")
            raise ChatTemplateError(
                "the model's chat template broke the process that rendered it", param="messages"
            ) from None
        except BaseException:
            self._end(process)
            raise
        self._idle.append(process)
        return reply

    async def _start(self) -> _Process:
        try:
            return await _Process.ready(self._time_max_s)
        except (OSError, EOFError) as error:
            raise OverloadedError(f"no process can be started to render the conversation: {error}") from error

    def _end(self, process: _Process) -> None:
        task = asyncio.get_running_loop().create_task(process.kill())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)


def _frame(command: Command) -> bytes:
    """A command as a frame.

    Raises:
        BadRequestError: a variable holds what a frame cannot: a number beyond 64 bits, half of a surrogate pair.
    """
    try:
        return encode_frame(command)
    except (OverflowError, UnicodeEncodeError, RecursionError):
        for name, value in command.variables.items() if isinstance(command, Render) else ():
            if not is_encodable(value):
                raise BadRequestError(
                    "a chat template takes no integers beyond 64 bits, no half of a surrogate pair and no deep nesting",
                    param=_FIELDS.get(name, f"chat_template_kwargs.{name}"),
                ) from None
        raise


def _error(reply: Reply) -> DataplaneError:
    assert isinstance(reply, Failed)
    if reply.kind == "refused":
        return BadRequestError(f"the chat template refuses these messages: {reply.message}", param="messages")
    if reply.kind == "broke":
        return BrokenTemplateError(f"the chat template fails with these messages: {reply.message}", param="messages")
    if reply.kind == "invalid":
        return InvalidTemplateError(f"the chat template cannot be compiled: {reply.message}")
    return ChatTemplateError(
        f"the model's chat template broke its limits with this conversation: {reply.message}", param="messages"
    )
