"""`python -m dataplane.constraints.checker`: compiles definitions that may be hostile, for a parent that may kill it.

The grammar library bounds most of its work, yet some definitions take it minutes, gigabytes, or more stack than a
process has, of which it dies. So each is compiled here first, with little memory and stack, and within the CPU time
that the parent allows: SIGPROF ends the process then. What passes can be compiled by a worker.

The parent writes a JSON line `{"folder": ..., "constraint": {...}, "cpu_max_s": ...}`. Two lines answer: an empty one
when the tokens of the folder are read, from when on the time counts, and `{"error": ...}`, null if the constraint can
be compiled.
"""

import json
import resource
import signal
import socket
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from dataplane.constraints.compiler import compile_grammar, compile_text
from dataplane.constraints.deep_threads import deep_threads
from dataplane.constraints.grammars import grammar_of, parsed_schema
from dataplane.constraints.schemas import parts, step_of
from dataplane.constraints.tokens import TokenTable
from dataplane.protocol.errors import BadRequestError, DataplaneError
from dataplane.protocol.messages import Constraint

MEMORY_BYTES = 2**30
"""More memory than the process has with its tokens, from which on an allocation fails and ends it."""
STACK_BYTES = 8 * 2**20
ERROR_CHARS_MAX = 600
PATH_CHARS_MAX = 200
_SUBSCHEMAS_MAX = 2_000
_DEFINITIONS = ("$defs", "definitions")


class Question(msgspec.Struct, frozen=True):
    """Whether a constraint can be compiled for the checkpoint in a folder, within so many CPU seconds."""

    folder: str
    constraint: Constraint
    cpu_max_s: float


def main() -> None:
    """Answer the questions on the socket whose descriptor is the argument, one after the other, until it closes."""
    thread = deep_threads(1, "check", stack_bytes=STACK_BYTES)
    connection = socket.socket(fileno=int(sys.argv[1]))
    for line in connection.makefile("rb"):
        question = msgspec.json.decode(line, type=Question)
        error = None
        try:
            tokens = _tokens(question.folder)
        except DataplaneError as refusal:
            tokens, error = None, refusal.message
        connection.sendall(b"\n")
        if tokens is not None:
            _limit_memory()
            signal.setitimer(signal.ITIMER_PROF, question.cpu_max_s)
            error = thread.submit(refusal_of, question.constraint, tokens).result()
            signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(json.dumps({"error": error and error[:ERROR_CHARS_MAX]}).encode() + b"\n")


def refusal_of(constraint: Constraint, tokens: TokenTable) -> str | None:
    """Why a constraint cannot be compiled, with the path in a schema; None if it can."""
    try:
        compile_grammar(constraint, tokens)
    except BadRequestError as error:
        if constraint.kind != "json_schema" or not isinstance(parsed_or_none(constraint), dict):
            return error.message
        path = _path_of(constraint, tokens, error.message)
        shown = path if len(path) <= PATH_CHARS_MAX else f"$...{path[-PATH_CHARS_MAX:]}"
        return f"{shown}: {error.message}"
    return None


def parsed_or_none(constraint: Constraint) -> Any:
    """The schema of a constraint; None if its text is none."""
    try:
        return parsed_schema(constraint.definition)
    except BadRequestError:
        return None


def _path_of(constraint: Constraint, tokens: TokenTable, message: str) -> str:
    """The path of the innermost part of a schema that fails for the same reason by itself."""
    root = parsed_schema(constraint.definition)
    assert isinstance(root, dict)
    shared = {name: root[name] for name in _DEFINITIONS if name in root}
    path, schema, tried = "$", root, 0
    while True:
        for keyword, key, part in parts(schema):
            step = step_of(keyword, key)
            tried += 1
            if tried > _SUBSCHEMAS_MAX:
                return path
            if _refusal(part, shared, tokens) == message:
                path, schema = path + step, part
                break
        else:
            return path


def _refusal(schema: Any, shared: dict[str, Any], tokens: TokenTable) -> str | None:
    if not isinstance(schema, dict):
        return None
    definition = json.dumps({**shared, **schema})
    try:
        compile_text(grammar_of(Constraint(kind="json_schema", definition=definition)), tokens)
    except BadRequestError as error:
        return error.message
    return None


@lru_cache(maxsize=4)
def _tokens(folder: str) -> TokenTable:
    return TokenTable(Path(folder))


def _limit_memory() -> None:
    """Let the process have `MEMORY_BYTES` more than it has now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    main()
