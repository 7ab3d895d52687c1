"""What a board is made of, and how it becomes Grafana's JSON.

Panels and boards are plain data; `dashboard` alone knows Grafana's builders. Every panel has a unit, says what to do,
and leads to a page of the console; every board leads to the others and keeps their time range.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

_SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "tidepool"
_HEIGHTS = {"stat": 4, "lines": 8, "areas": 8, "table": 8}
Builder = timeseries.Panel | stat.Panel | table.Panel


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Some queries (by the legend of their series) in one unit of Grafana. `about`: what it shows, and what to do.
    `page`: of the console. `bad_above`, `bad_below`: where a figure becomes red. `top`: of the unit, such as 1.
    """

    title: str
    about: str
    unit: str
    queries: dict[str, str]
    page: str
    kind: Literal["stat", "lines", "areas", "table"] = "lines"
    width: int = 8
    bad_above: float | None = None
    bad_below: float | None = None
    top: float | None = None


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A choice of values, as Prometheus has them."""

    name: str
    label: str
    query: str


REGION = Variable(name="region", label="Region", query="label_values(tidepool_nodes, region)")
MODEL = Variable(name="model", label="Model", query="label_values(tidepool_instances, model)")
TIER = Variable(name="tier", label="Tier", query="label_values(tidepool_requests_total, tier)")
NODE = Variable(name="node", label="Agent", query='label_values(tidepool_slot_load{region=~"$region"}, instance)')


@dataclass(frozen=True, kw_only=True)
class Board:
    """Rows of panels by their title. `name`: of its file and of its address."""

    name: str
    title: str
    about: str
    page: str
    variables: tuple[Variable, ...]
    rows: dict[str, tuple[Panel, ...]] = field(default_factory=dict)

    def panels(self) -> Iterator[Panel]:
        """All panels in their order."""
        for panels in self.rows.values():
            yield from panels


def dashboard(board: Board) -> str:
    """The board as Grafana's JSON."""
    made = (
        builders.Dashboard(f"Tidepool: {board.title}")
        .uid(f"tidepool-{board.name}")
        .description(board.about)
        .tags([_TAG])
        .timezone(common.TimeZoneBrowser)
        .time("now-6h", "now")
        .refresh("30s")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(_board_links())
        .link(_console_link("Console", board.page))
        .with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            builders.TextBoxVariable("console")
            .label("Console")
            .description("The address of a gateway, without a slash at its end")
            .default_value("http://127.0.0.1:8080")
        )
    )
    for variable in board.variables:
        made.with_variable(_variable(variable))
    number = 0
    for title, panels in board.rows.items():
        made.with_row(builders.Row(title).id(number := number + 1))
        for panel in panels:
            made.with_panel(_panel(panel).id(number := number + 1))
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _board_links() -> builders.DashboardLink:
    return (
        builders.DashboardLink("Boards")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([_TAG])
        .keep_time(True)
        .include_vars(True)
    )


def _console_link(title: str, page: str) -> builders.DashboardLink:
    return (
        builders.DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .icon("external link")
        .url(f"${{console}}/ui/#/{page}")
        .target_blank(True)
    )


def _variable(variable: Variable) -> builders.QueryVariable:
    return (
        builders.QueryVariable(variable.name)
        .label(variable.label)
        .query(variable.query)
        .datasource(_SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(panel: Panel) -> Builder:
    made = _drawn(panel)
    made.title(panel.title).description(panel.about).datasource(_SOURCE).unit(panel.unit)
    made.span(panel.width).height(_HEIGHTS[panel.kind]).links([_console_link("Console", panel.page)])
    if panel.top is not None:
        made.min(0).max(panel.top)
    if panel.bad_above is not None or panel.bad_below is not None:
        made.thresholds(_thresholds(panel))
    for letter, (legend, expr) in zip("ABCDEFGH", panel.queries.items(), strict=False):
        query = prometheus.Dataquery().ref_id(letter).expr(expr).legend_format(legend).datasource(_SOURCE)
        if panel.kind == "table":
            query.format(prometheus_models.PromQueryFormat.TABLE)
        made.with_target(query.range() if panel.kind in {"lines", "areas"} else query.instant())
    return made


def _drawn(panel: Panel) -> Builder:
    if panel.kind == "table":
        return table.Panel()
    if panel.kind == "stat":
        last = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
        return stat.Panel().reduce_options(last).color_mode(common.BigValueColorMode.VALUE)
    legend = (
        common_builders.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([])
    )
    tooltip = (
        common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    )
    lines = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1)
    if panel.kind == "areas":
        lines.fill_opacity(40).stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    return lines


def _thresholds(panel: Panel) -> builders.ThresholdsConfig:
    """Red from `bad_above` on, or below `bad_below`."""
    if panel.bad_above is not None:
        first, then, at = "green", "red", panel.bad_above
    else:
        first, then, at = "red", "green", panel.bad_below or 0.0
    steps = [models.Threshold(value=None, color=first), models.Threshold(value=at, color=then)]
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
