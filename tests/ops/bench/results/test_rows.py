"""What the rows read out of answers of their commands."""

from ops.bench.results.aegaeon_rows import AEGAEON_ROWS
from ops.bench.results.fleet_rows import FLEET_ROWS
from ops.bench.results.forecast_rows import FORECAST_ROWS
from ops.bench.results.placement_rows import PLACEMENT_ROWS
from ops.bench.results.remapping_rows import REMAPPING_ROWS


def test_a_limit_is_a_mean_and_its_range_and_the_metric_that_loses_is_bold() -> None:
    answer = [{"service": {"mean": 58.4, "draws": [60, 58]}, "token": {"mean": 56.0, "draws": [54, 58]}}]
    pool, aggregated = AEGAEON_ROWS["half-a-request-pooled"], AEGAEON_ROWS["limits-pooled-both"]
    assert pool.text.format(**pool.values(answer)) == "58.4 (58 to 60), 56.0 (54 to 58)"
    assert aggregated.text.format(**aggregated.values(answer)) == "58.4 (58 to 60), **56.0 (54 to 58)**"
    assert "--rate 0.5" in pool.command


def test_where_time_goes_is_read_by_stage_state_and_size() -> None:
    row = AEGAEON_ROWS["times-pooled"]
    stages = ("prefill waiting", "prefill", "KV transfer", "decode", "decode waiting")
    states = ("prefill", "decode", "weights", "kv", "idle")
    times = {"hidden": 0.6, "in_a_second": 0.75, "quantiles": {"0.99": 0.2, "1": 0.4}}
    answer = [
        {
            "requests": {stage: {"mean": 0.2} for stage in stages},
            "slots": {state: {"mean": 0.2} for state in states},
            "switches": {size: times | {"quantiles": {"1": most}} for size, most in (("7B", 1), ("9B", 2), ("13B", 3))},
            "kv": times,
        }
    ]
    shown = row.text.format(**row.values(answer))
    assert shown.count("20.0%") == 10
    assert "**within 1 s 75%, 75%, 75%**, at most 3.0 s; a request's KV at most 0.40 s, p99 0.20 s" in shown


def test_variants_are_compared_by_the_hours_of_the_first_over_the_second() -> None:
    row = FLEET_ROWS["siloed"]
    one = {"variant": "a", "requests": 7, "instance_hours": 30.0, "gpu_hours": 30.0, "late": 0.1, "ttft_p95_s": 1.0}
    other = one | {"variant": "b", "instance_hours": 60.0, "late": 0.2}
    values = row.values([one, one | {"instance_hours": 34.0}, other, other | {"instance_hours": 68.0, "late": 0.4}])
    assert row.cells(values)[1] == "32.0 for 64.0 (-50%); **10.0% for 30.0%**"
    assert (values["late1_least"], values["late1_most"]) == (0.2, 0.4)
    assert "7 requests at 4.8/s" in row.cells(values)[0]


def test_placements_are_read_by_solver_and_gap() -> None:
    row = PLACEMENT_ROWS["placement"]
    one = {"shape": "20 x 20 x 5", "wanted_gap": 0.001, "reached": 10, "cpu_s": 5.0, "cpu_most_s": 12.9}
    other = one | {"wanted_gap": 0.005, "reached": 9}
    solvers = [one | {"solver": "plain, HiGHS", "reached": 1}, other | {"solver": "ours, by prices"}]
    values = row.values({"medians": [*solvers, one | {"solver": "ours, by prices"}]})
    assert row.cells(values)[1] == "10; 5.0, 12.9"
    assert row.cells(values)[2].endswith("60 s: 1; 5, 13")


def test_series_are_counted_by_the_targets_that_they_miss() -> None:
    row = FORECAST_ROWS["zoo"]
    one = {"series": 3, "met": 2, "low": 1, "high": 0, "best": 1, "last_hour": 0}
    other = {"series": 2, "met": 0, "low": 0, "high": 1, "best": 1, "last_hour": 1}
    errors = {"errors_met": 2, "rival_errors_met": 1}
    values = row.values({"kinds": [one | errors, other | errors]})
    assert row.cells(values)[1] == "2; 2, **2**, 1"
    assert "are met by 4, and by 2 if" in row.cells(values)[2]
    assert "of 5, how many" in row.cells(values)[0]


def test_remapping_is_told_by_group_beside_the_papers_figures() -> None:
    row = REMAPPING_ROWS["remapping"]
    groups = ("temporal", "uneven", "inputs", "spatial", "single")
    published = [
        {"group": name, "figure": figure, "percent": 40.0 + place, "ours_percent": -1.0 * place}
        for place, name in enumerate(groups)
        for figure in ("tokens_per_s", "tbt_p99_s")
    ]
    values = row.values({"published": published})
    assert row.cells(values)[1:3] == ("-0, -1, -2, -3, -4 %", "paper, on GH200: +40, +41, +42, +43, +44 %")
