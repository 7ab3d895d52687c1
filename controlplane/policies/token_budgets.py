"""Budgets of tokens, which are reserved in blocks so that they are never overrun: what is reserved counts as used until
it is returned, so whoever loses its block, or its memory, only leaves tokens unused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_BLOCK = 100
"""A block is this part of its budget at most: what is lost with a gateway."""
_LAST_BLOCKS = 10
"""A block is this part at most of what is left, so that the last tokens are not all held by one gateway."""


class Budget(StrEnum):
    """A budget of a tenant: the names are those of its limits."""

    DAY = "tokens_per_day"
    MONTH = "tokens_per_month"
    TOTAL = "tokens_total"


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """Tokens of a budget, and how many of them are reserved."""

    tokens: int
    reserved: int

    @property
    def left(self) -> int:
        return self.tokens - self.reserved


@dataclass(frozen=True, kw_only=True)
class BlockChoice:
    """The tokens to reserve of each budget; 0 where `refused` has too few left."""

    tokens: int
    refused: Budget | None = None


def choose_block(budgets: Mapping[Budget, Reserved], need: int) -> BlockChoice:
    """The block for a request that may take `need` tokens and for some after it."""
    scarce = min(budgets, key=lambda budget: budgets[budget].left)
    left = budgets[scarce].left
    if left < need:
        return BlockChoice(tokens=0, refused=scarce)
    spare = min(left // _LAST_BLOCKS, *(budget.tokens // _BLOCK for budget in budgets.values()))
    return BlockChoice(tokens=max(need, spare))
