"""What every picture here shares: panels under each other, time in UTC, tokens per second, colours, the file."""

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = npt.NDArray[np.float64]

SUFFIXES = (".png", ".svg", ".pdf")
DAY_S = 86_400.0
"""An axis of time counts days since 1970."""
PANELS_MAX = 12
"""Most panels of one picture: more cannot be read."""

HISTORY, ACTUAL, FORECAST, CAPACITY, NOW = "#8a8a8a", "#1a1a1a", "#0072b2", "#d55e00", "#555555"
_PANEL_WIDTH_IN, _PANEL_HEIGHT_IN, _HEAD_IN, _FOOT_IN = 11.0, 2.9, 0.7, 0.5
_SVG_WIDTH_IN = 10.5
_SVG_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tidepool",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "text.parse_math": False,
}


class PlotError(Exception):
    """A picture that cannot be made."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """A rate over time.

    Attributes:
        start_s: shape (points,), Unix times at which the buckets begin, ascending.
        tokens_per_s: shape (points,), NaN = a gap: the line breaks there.
        bucket_s: how long each bucket lasts.
    """

    start_s: FloatArray
    tokens_per_s: FloatArray
    bucket_s: float


def check_path(path: Path) -> None:
    """See that a picture can be written there, before long work is done for it.

    Raises:
        PlotError: the name's ending is none of `SUFFIXES`, or the folder does not exist.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(f"{path}: the name must end in one of {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"{path}: the folder {path.absolute().parent} does not exist")


def new_figure(count: int, title: str) -> "tuple[Figure, Sequence[Axes]]":
    """A figure with `count` panels under each other."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - heavy

    height_in = count * _PANEL_HEIGHT_IN + _HEAD_IN + _FOOT_IN
    figure = Figure(figsize=(_PANEL_WIDTH_IN, height_in), layout="constrained")
    grid = figure.subplots(count, 1, squeeze=False)
    figure.suptitle(title, fontsize=13, fontweight="bold", parse_math=False)
    return figure, [row[0] for row in grid]


def finish_panel(axes: "Axes", title: str, *, first_s: float, end_s: float) -> None:
    """Title, units, legend and time axis of a panel whose lines are drawn."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter  # noqa: PLC0415 - heavy
    from matplotlib.ticker import EngFormatter  # noqa: PLC0415 - heavy

    axes.set_ylabel("input tokens/s")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=first_s / DAY_S, right=end_s / DAY_S)
    locator = AutoDateLocator(tz=UTC)  # type: ignore[no-untyped-call] # matplotlib has no types here
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
    axes.set_xlabel("time, UTC")
    frame_panel(axes, title)


def frame_panel(axes: "Axes", title: str) -> None:
    """Title, grid and legend of a panel whose lines are drawn."""
    axes.set_title(title, loc="left", fontsize=10, pad=18, parse_math=False)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    add_legend(axes)


def add_legend(axes: "Axes") -> None:
    """Above the panel, on the right: it hides nothing. None where nothing is labelled."""
    if not axes.get_legend_handles_labels()[0]:
        return
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=6, fontsize=8, frameon=False, borderaxespad=0.2,
        handlelength=1.4, columnspacing=1.2,
    )  # fmt: skip


def draw_curve(axes: "Axes", curve: Curve, label: str, colour: str) -> None:
    """A rate as steps, one for each bucket."""
    if not len(curve.start_s):
        return
    start_s, rates = with_gaps(curve)
    axes.step(start_s / DAY_S, rates, where="post", color=colour, linewidth=1.1, label=label)


def with_gaps(curve: Curve) -> tuple[FloatArray, FloatArray]:
    """Times and rates with a NaN where buckets are missing, and the end of the last bucket, so that steps are whole."""
    ends = curve.start_s + curve.bucket_s
    breaks = np.flatnonzero(curve.start_s[1:] > ends[:-1] + 1e-3) + 1
    start_s = np.insert(curve.start_s, breaks, ends[breaks - 1])
    rates = np.insert(curve.tokens_per_s, breaks, np.nan)
    return np.append(start_s, ends[-1]), np.append(rates, rates[-1])


def save(figure: "Figure", path: Path) -> None:
    """Write the picture.

    Raises:
        PlotError: it cannot be written there.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise PlotError(f"{path}: cannot be drawn: {error}") from error


def draw_svg(paint: "Callable[[Figure], None]", height_in: float) -> str:
    """A figure as an SVG element, the same for the same figures."""
    import matplotlib as mpl  # noqa: PLC0415 - heavy
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context(_SVG_STYLE):
        figure = Figure(figsize=(_SVG_WIDTH_IN, height_in), layout="constrained", facecolor="none")
        paint(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
