"""Checks a PromQL expression against what is exported: names, labels, and that functions fit the types of metrics."""

import re
from collections.abc import Iterator, Mapping

import promql_parser as promql

from tests.ops.deploy.exported import Sample

_OF_COUNTERS = {"rate", "irate", "increase"}
_OF_GAUGES = {"deriv", "delta", "idelta", "predict_linear"}


def faults(expr: str, known: Mapping[str, Sample]) -> Iterator[str]:
    """What is wrong with an expression; Grafana's variables stand for values."""
    yield from _faults(_parsed(expr), known)


def metrics_of(expr: str) -> Iterator[str]:
    """The metrics that an expression asks for."""
    yield from _metrics(_parsed(expr))


def filled(expr: str, *, rate_interval: str = "5m") -> str:
    """An expression with values for Grafana's variables; "All" is chosen everywhere."""
    return re.sub(r"\$\{?\w+\}?", ".*", expr.replace("$__rate_interval", rate_interval))


def _parsed(expr: str) -> promql.Expr:
    return promql.parse(filled(expr))


def _faults(node: promql.Expr, known: Mapping[str, Sample]) -> Iterator[str]:
    if isinstance(node, promql.VectorSelector):
        yield from _selector_faults(node, known)
        if node.name in known and known[node.name].type == "counter":
            yield f"{node.name} is a counter, used without rate()"
    elif isinstance(node, promql.MatrixSelector):
        yield from _selector_faults(node.vector_selector, known)
    elif isinstance(node, promql.Call):
        yield from _call_faults(node, known)
    elif isinstance(node, promql.AggregateExpr):
        yield from _faults(node.expr, known)
        if node.modifier is not None:
            yield from _unknown_labels(node.modifier.labels, node.expr, known)
    elif isinstance(node, promql.BinaryExpr):
        yield from _faults(node.lhs, known)
        yield from _faults(node.rhs, known)
        if node.modifier is not None and node.modifier.matching is not None:
            yield from _unknown_labels(node.modifier.matching.labels, node.lhs, known)
            yield from _unknown_labels(node.modifier.matching.labels, node.rhs, known)
    elif isinstance(node, promql.ParenExpr | promql.UnaryExpr | promql.SubqueryExpr):
        yield from _faults(node.expr, known)


def _selector_faults(node: promql.VectorSelector, known: Mapping[str, Sample]) -> Iterator[str]:
    if node.name not in known:
        yield f"{node.name} is exported by nobody"
        return
    for matcher in node.matchers.matchers:
        if matcher.name not in known[node.name].labels:
            yield f"{node.name} has no label {matcher.name}"


def _call_faults(node: promql.Call, known: Mapping[str, Sample]) -> Iterator[str]:
    name = node.func.name
    for argument in node.args:
        yield from _faults(argument, known)
        if isinstance(argument, promql.MatrixSelector) and argument.vector_selector.name in known:
            kind = known[argument.vector_selector.name].type
            if name in _OF_COUNTERS and kind != "counter":
                yield f"{name}() of {argument.vector_selector.name}, a {kind}"
            if name in _OF_GAUGES and kind != "gauge":
                yield f"{name}() of {argument.vector_selector.name}, a {kind}"
    if name == "histogram_quantile":
        metrics = list(_metrics(node.args[1]))
        if not metrics or not all(metric.endswith("_bucket") for metric in metrics):
            yield f"histogram_quantile() of {metrics}"
        if isinstance(node.args[1], promql.AggregateExpr) and "le" not in node.args[1].modifier.labels:
            yield f"histogram_quantile() of {metrics}, aggregated without le"


def _metrics(node: promql.Expr) -> Iterator[str]:
    found: list[str] = []

    def note(each: promql.Expr) -> None:
        if isinstance(each, promql.VectorSelector):
            found.append(each.name)

    promql.walk(node, pre_visit=note)
    yield from found


def _unknown_labels(labels: list[str], node: promql.Expr, known: Mapping[str, Sample]) -> Iterator[str]:
    for metric in _metrics(node):
        if metric in known:
            yield from (f"{metric} has no label {label}" for label in labels if label not in known[metric].labels)
