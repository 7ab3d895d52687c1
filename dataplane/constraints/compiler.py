"""Compiles the constraints of a model's requests, each definition once."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from dataplane.constraints.deep_threads import deep_threads
from dataplane.constraints.grammars import grammar_of
from dataplane.constraints.matcher import Matcher, first_line
from dataplane.constraints.tokens import TokenTable
from dataplane.protocol.errors import BadRequestError
from dataplane.protocol.messages import Constraint

COMPILED_MAX = 64
"""Definitions of a model that stay compiled. Each is 10 kB to some MB."""

_STEP_ITEMS_MAX = 30_000
_STEP_FUEL_MAX = 200_000
_LEXER_STATES_MAX = 100_000
"""Limits of one mask, in llguidance's units: most take 0.1 ms, and 20 to 60 ms within these."""


class ConstraintCompiler:
    """The compiled constraints of one model; reads its tokenizer with the first one. Thread-safe."""

    def __init__(self, folder: Path, *, size: int | None = None, eos_ids: Iterable[int] | None = None) -> None:
        """The parameters are those of `TokenTable`."""
        self._folder = folder
        self._size = size
        self._eos_ids = None if eos_ids is None else frozenset(eos_ids)
        self._tokens: TokenTable | None = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> None:
        """Compile a constraint, which `matcher` then finds: the slow part of it.

        Raises:
            BadRequestError: it cannot be compiled; the message says why and, for a schema, where.
        """
        self._find(constraint)

    def matcher(self, constraint: Constraint, *, prompt_tokens: int) -> Matcher:
        """A matcher for an answer that follows a prompt of so many tokens; raises as `compile` does."""
        compiled = self._find(constraint)
        tokens = self._token_table()
        return Matcher(
            compiled.deep_copy(), size=self._size or tokens.size, eos_ids=tokens.eos_ids, prompt_tokens=prompt_tokens
        )

    def _find(self, constraint: Constraint) -> Any:
        with self._lock:
            if (found := self._compiled.get(constraint)) is not None:
                self._compiled.move_to_end(constraint)
                return found
        made = _threads().submit(compile_grammar, constraint, self._token_table()).result()
        with self._lock:
            self._compiled[constraint] = made
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return made

    def _token_table(self) -> TokenTable:
        with self._lock:
            if self._tokens is None:
                self._tokens = TokenTable(self._folder, size=self._size, eos_ids=self._eos_ids)
            return self._tokens


def compile_grammar(constraint: Constraint, tokens: TokenTable) -> Any:
    """The llguidance matcher of a constraint, at its start. It may take long, or exhaust a small stack.

    Raises:
        BadRequestError: llguidance refuses the definition.
    """
    return compile_text(grammar_of(constraint, tokens.added), tokens)


def compile_text(grammar: str, tokens: TokenTable) -> Any:
    """The llguidance matcher of a grammar text; raises as `compile_grammar` does."""
    import llguidance  # noqa: PLC0415  (it belongs to an extra)

    limits = llguidance.LLParserLimits(
        step_max_items=_STEP_ITEMS_MAX,
        step_lexer_fuel=_STEP_FUEL_MAX,
        max_lexer_states=_LEXER_STATES_MAX,
        verbose_errors=False,
    )
    matcher = llguidance.LLMatcher(tokens.table, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        ignored = matcher.get_grammar_warnings()
        if ignored:
            raise BadRequestError("; ".join(ignored), param="definition")
        first = matcher.deep_copy()
        first.compute_logit_bias()
        if first.is_error():
            raise BadRequestError(f"no text matches it: {first_line(first.get_error())}", param="definition")
    if matcher.is_error():
        raise BadRequestError(matcher.get_error().strip(), param="definition")
    return matcher


@cache
def _threads() -> ThreadPoolExecutor:
    return deep_threads(1, "grammars")
