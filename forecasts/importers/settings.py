"""Settings of an import: names, times and lengths that the public formats leave out."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forecasts.importers.lines import TIME_S_MAX, Progress
from forecasts.series import DemandRow

MINUTE_S = 60.0
MONDAY_S = 1_731_283_200.0
"""2024-11-11 00:00 UTC, a Monday: the default for time 0 of a recording."""


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """Values that the file does not have.

    Attributes:
        start_s: Unix time of time 0, for formats with relative times; a whole minute.
        regions: one region, or several for formats with clients, which are distributed over them round-robin.
        model: the model, for formats without one; None = the default of the format.
        tokens_per_request: mean input tokens per request, for formats that count requests; None = the format's default.
        workload: the workload to read, for formats with several.
    """

    start_s: float = MONDAY_S
    regions: tuple[str, ...] = ("all",)
    model: str | None = None
    tokens_per_request: float | None = None
    workload: str = "prod"

    def __post_init__(self) -> None:
        """Raises ValueError if a field is out of range."""
        if not (0 <= self.start_s <= TIME_S_MAX and self.start_s % MINUTE_S == 0):
            raise ValueError(f"start_s: must be a Unix time of a whole minute, got {self.start_s:.15g}")
        if not self.regions or len(set(self.regions)) < len(self.regions):
            raise ValueError(f"regions: must be one or more different names, got {', '.join(self.regions) or 'none'}")
        for field, names in (("regions", self.regions), ("model", () if self.model is None else (self.model,))):
            if not all(name.strip() and name.isprintable() for name in names):
                raise ValueError(f"{field}: a name must not be empty and must be printable")
        tokens = self.tokens_per_request
        if tokens is not None and not (tokens > 0 and math.isfinite(tokens)):
            raise ValueError(f"tokens_per_request: must be above 0 and finite, got {tokens}")

    @property
    def region(self) -> str:
        """The region of a format that takes one."""
        return self.regions[0]


Reader = Callable[[Path, ImportSettings, Progress], Iterator[DemandRow]]
"""Rows of demand from a file in its order. Raises DemandFileError."""
