"""Values of several things against a number, and the value that they are to keep: curves of attainment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.plots.panels import NOW, frame_panel, new_figure, save

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1a1a1a", "#8a8a8a")


@dataclass(frozen=True, kw_only=True)
class LinesPanel:
    """`lines`: by name, points (x, y). `kept`: a level to be kept, drawn dashed. Shares are drawn from 0 to 1."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    kept: float | None = None
    shares: bool = True


def draw_lines(panels: Sequence[LinesPanel], title: str, path: Path) -> None:
    """Draw panels under each other, and write them to a file.

    Raises:
        ops.plots.panels.PlotError: it cannot be written there.
    """
    figure, all_axes = new_figure(len(panels), title)
    for panel, axes in zip(panels, all_axes, strict=True):
        for number, (name, points) in enumerate(panel.lines.items()):
            colour = COLOURS[number % len(COLOURS)]
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=colour, marker="." if len(points) < 60 else "", linewidth=1.2, label=name)
        if panel.kept is not None:
            axes.axhline(panel.kept, color=NOW, linewidth=0.9, linestyle="--")
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.set_ylim(0.0, 1.02) if panel.shares else axes.set_ylim(bottom=0.0)
        frame_panel(axes, panel.title)
    save(figure, path)
