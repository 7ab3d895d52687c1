"""Checks the constraint of each request before a worker compiles it, in a process that a hostile one may kill."""

import asyncio
import signal
from collections import OrderedDict

import msgspec

from dataplane.agent.child_process import ChildProcess
from dataplane.agent.settings import AgentSettings
from dataplane.constraints.checker import Question
from dataplane.protocol.errors import BadRequestError, DataplaneError, OverloadedError
from dataplane.protocol.messages import Constraint

_CHECKED_MAX = 512
"""Answers that are remembered, refusals included."""
_WAITING_MAX = 16
"""Checks that may wait; each takes `constraint_compile_max_s` of a core at most."""
_START_MAX_S = 120.0
"""Limit for starting the process and reading a tokenizer, which no request can make longer."""
_ANSWER_MAX_S = 30.0
"""Limit for an answer by the clock, where the machine is too busy to give the process its CPU time."""
_PARAMS = {"json_object": "response_format", "json_schema": "response_format"}


class ConstraintChecker:
    """Asks a process of its own whether constraints can be compiled, one after the other. The process is started with
    the first one, and again after it was killed or has died.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._chars_max = settings.constraint_chars_max
        self._compile_max_s = settings.constraint_compile_max_s
        self._known: OrderedDict[tuple[str, Constraint], str | None] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0
        self._process: ChildProcess | None = None

    async def check(self, constraint: Constraint, folder: str, *, param: str | None = None) -> None:
        """Refuse a constraint that a worker could not compile in time for the checkpoint in a folder.

        Raises:
            BadRequestError: it cannot be compiled, the message says why and where; or it takes too much time or memory.
                `param` is the given one, by default that of its kind.
            OverloadedError: too many others wait to be checked, or the machine has no time for it.
        """
        param = param or _PARAMS.get(constraint.kind, "structured_outputs")
        if len(constraint.definition) > self._chars_max:
            size = f"{len(constraint.definition)} characters"
            raise BadRequestError(f"the definition has {size}; {self._chars_max} is the limit", param=param)
        key = (folder, constraint)
        if key not in self._known:
            await self._ask(key)
        self._known.move_to_end(key)
        refusal = self._known[key]
        if refusal is not None:
            raise BadRequestError(refusal, param=param)

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def _ask(self, key: tuple[str, Constraint]) -> None:
        """Have the answer to a question among the known ones."""
        if self._waiting >= _WAITING_MAX:
            raise OverloadedError(f"{self._waiting} other constraints wait to be compiled")
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                if key not in self._known:
                    self._known[key] = await self._answer(*key)
        finally:
            self._waiting -= 1
        while len(self._known) > _CHECKED_MAX:
            self._known.popitem(last=False)

    async def _answer(self, folder: str, constraint: Constraint) -> str | None:
        """Why a constraint is refused, None if it is not. A process that does not answer is killed."""
        is_answered, process = False, await self._started()
        try:
            question = Question(folder, constraint, self._compile_max_s)
            process.writer.write(msgspec.json.encode(question) + b"\n")
            async with asyncio.timeout(_START_MAX_S):
                begun = await _line(process)
            if not begun:
                raise DataplaneError("the process that checks constraints cannot be started")
            try:
                async with asyncio.timeout(self._compile_max_s + _ANSWER_MAX_S):
                    line = await _line(process)
            except TimeoutError:
                raise OverloadedError("the node is too busy to compile the definition") from None
            if line:
                is_answered = True
                answer: str | None = msgspec.json.decode(line)["error"]
                return answer
        finally:
            if not is_answered:
                await self.close()
        if process.process.returncode == -signal.SIGPROF:
            return f"the definition takes longer to compile than {self._compile_max_s:g} s"
        return "the definition needs too much memory, or is nested too deep"

    async def _started(self) -> ChildProcess:
        if self._process is not None and self._process.process.poll() is not None:
            await self.close()
        if self._process is None:
            self._process = await ChildProcess.start("dataplane.constraints.checker")
        return self._process


async def _line(process: ChildProcess) -> bytes:
    """Its next line; an empty one if it has ended."""
    try:
        return await process.reader.readline()
    except ConnectionError:
        return b""
