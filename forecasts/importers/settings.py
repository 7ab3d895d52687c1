"""What an importer is told beside the file: names, times and lengths that the public formats leave out."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forecasts.importers.lines import TIME_S_MAX, Told
from forecasts.series import DemandRow

MINUTE_S = 60.0
MONDAY_S = 1_731_283_200.0
"""2024-11-11 00:00 UTC, a Monday: what "time 0" of a recording is taken for unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """What the file does not say.

    Attributes:
        start_s: Unix time of time 0, for formats with relative times; a whole minute.
        regions: the regions to name. One, but for formats that tell their clients apart: these are dealt out in turn.
        model: the model to name, for formats that name none; None = the format's own default.
        tokens_per_request: mean input tokens of a request, for formats that count requests; None = the format's own.
        workload: which workload to take, for formats with several.
    """

    start_s: float = MONDAY_S
    regions: tuple[str, ...] = ("all",)
    model: str | None = None
    tokens_per_request: float | None = None
    workload: str = "prod"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: a field is out of range.
        """
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


Reader = Callable[[Path, ImportSettings, Told], Iterator[DemandRow]]
"""Rows of demand from a file, as they come. Raises DemandFileError."""
