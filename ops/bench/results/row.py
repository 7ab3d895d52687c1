"""A row of the page of results that a command makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DATA = "{data}"
"""In arguments: the folder of the recordings."""


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """A line of the table.

    Attributes:
        what: what is measured, and under which assumptions; names of figures in braces, as in `text`.
        arguments: of `python`, for a command that prints JSON.
        values: the figures in its answer, by name.
        text: what the table says of them, with their names in braces.
        against: what it is compared with; names of figures in braces, as in `text`.
        drawn: what chance decides in it: the draws or seeds, and what its ranges are of.
        tolerance: by how much of itself a figure may differ when the command runs again; 0 where nothing is timed.
    """

    what: str
    arguments: tuple[str, ...]
    values: Callable[[Any], Mapping[str, float]]
    text: str
    against: str
    drawn: str = "nothing"
    tolerance: float = 0.0

    @property
    def command(self) -> str:
        """What a reader types."""
        return " ".join(("python", *self.arguments)).replace(f"{DATA}/", "DATA/")

    def cells(self, values: Mapping[str, float]) -> tuple[str, str, str, str]:
        """What is measured, the figures, what they are compared with, and what was drawn."""
        return self.what.format(**values), self.text.format(**values), self.against.format(**values), self.drawn
