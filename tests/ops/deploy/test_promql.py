"""The checker of expressions finds what is wrong, so that boards and alerts that pass are right."""

import pytest

from tests.ops.deploy.exported import exported
from tests.ops.deploy.promql import faults


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("tidepool_requests_totals", "tidepool_requests_totals is exported by nobody"),
        ("rate(tidepool_request_total[5m])", "tidepool_request_total is exported by nobody"),
        ("tidepool_requests_total", "tidepool_requests_total is a counter, used without rate()"),
        ("rate(tidepool_streams[5m])", "rate() of tidepool_streams, a gauge"),
        ("deriv(tidepool_requests_total[5m])", "deriv() of tidepool_requests_total, a counter"),
        ('tidepool_nodes{zone="a"}', "tidepool_nodes has no label zone"),
        ("sum by (zone) (rate(tidepool_requests_total[5m]))", "tidepool_requests_total has no label zone"),
        ("tidepool_ready + on (zone) tidepool_streams", "tidepool_ready has no label zone"),
        ("histogram_quantile(0.9, rate(tidepool_requests_total[5m]))", "histogram_quantile() of"),
        (
            "histogram_quantile(0.9, sum by (tier) (rate(gen_ai_server_request_duration_seconds_bucket[5m])))",
            "aggregated without le",
        ),
        ("max(max_over_time((tidepool_nothing)[1h:5m]))", "tidepool_nothing is exported by nobody"),
        ("tidepool_kv_relief_total", "tidepool_kv_relief_total is exported by nobody"),
    ],
)
def test_a_fault_is_found(expr: str, fault: str) -> None:
    assert any(fault in found for found in faults(expr, exported())), list(faults(expr, exported()))


def test_a_right_expression_has_none() -> None:
    right = (
        'histogram_quantile(0.9, sum by (le) (rate(gen_ai_server_request_duration_seconds_bucket{tier=~"$tier"}[5m])))'
    )
    assert list(faults(right, exported())) == []


def test_what_is_no_promql_is_refused() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        list(faults("sum(rate(", exported()))
