"""Plans, forecasts and the loops that make them."""

from ops.deploy.boards.board import MODEL, REGION, Board, Panel

_TBT_RATIO = (
    "max by (model, region, gpu_type)"
    ' (tidepool_latency_measured_seconds{model=~"$model", region=~"$region", kind="tbt"}'
    " / tidepool_latency_predicted_seconds)"
)

PLANNING = Board(
    name="planning",
    title="planning",
    about="The plan in force, how forecasts did, and whether the loops run.",
    page="plans",
    variables=(REGION, MODEL),
    rows={
        "The plan in force": (
            Panel(
                title="Age of its hour",
                about="Time since the hour of the plan began. Above two hours: newer plans fail, wait, or are not"
                " made.",
                unit="s",
                queries={"age": "time() - max(tidepool_plan_window_start_timestamp_seconds)"},
                page="plans",
                kind="stat",
                width=4,
                bad_above=7200,
            ),
            Panel(
                title="Plans that wait",
                about="Plans that wait for an operator. Approve or reject them before their hour is over.",
                unit="none",
                queries={"waiting": "max(tidepool_plans_waiting)"},
                page="plans",
                kind="stat",
                width=4,
                bad_above=1,
            ),
            Panel(
                title="Demands not served",
                about="Demands that the plan leaves unserved in part. Above 0: the plan names the models; add GPUs"
                " there.",
                unit="none",
                queries={"unserved": "max(tidepool_plan_unserved)"},
                page="plans",
                kind="stat",
                width=4,
                bad_above=1,
            ),
            Panel(
                title="Cost and objective an hour",
                about="The price of the plan's GPUs; the objective has the prices of what it does not keep too. A jump:"
                " compare the plan with the one before.",
                unit="none",
                queries={
                    "cost": "max(tidepool_plan_cost_per_hour)",
                    "objective": "max(tidepool_plan_objective_per_hour)",
                },
                page="plans",
                kind="stat",
                width=4,
            ),
            Panel(
                title="Gap",
                about="How far the plan may be from the best one. Above 5 %: the solver ran out of time; give it more.",
                unit="percentunit",
                queries={"gap": "max(tidepool_plan_gap_ratio)"},
                page="plans",
                kind="stat",
                width=4,
                bad_above=0.05,
            ),
            Panel(
                title="Time to solve",
                about="How long the solver took. It grows with models times regions.",
                unit="s",
                queries={"time": "max(tidepool_plan_solve_seconds)"},
                page="plans",
                kind="stat",
                width=4,
            ),
        ),
        "Forecasts": (
            Panel(
                title="Coverage of the last day",
                about="Share of hourly peaks that stayed within their forecast, and the share that was asked for. Far"
                " below: plans are too small; look for series that changed, or raise TIDEPOOL_FORECAST_QUANTILE.",
                unit="percentunit",
                queries={
                    "coverage": "max(tidepool_forecast_coverage_ratio)",
                    "asked for": "max(tidepool_forecast_quantile)",
                },
                page="forecasts",
                top=1,
            ),
            Panel(
                title="Error of the last day",
                about="Error of the forecast peaks as a share of the real ones. It rises when demand changes its"
                " pattern.",
                unit="percentunit",
                queries={"error": "max(tidepool_forecast_error_ratio)"},
                page="forecasts",
            ),
            Panel(
                title="Hours scored",
                about="Hours of series that both were forecast and are known. Few: gateways or the measure loop were"
                " down.",
                unit="short",
                queries={"hours": "max(tidepool_forecast_hours_scored)"},
                page="forecasts",
            ),
        ),
        "Profiles": (
            Panel(
                title="Time between tokens, beside its profile",
                about="Measured in the last hour, as a multiple of what the corrected profile predicts. Away from 1 for"
                " hours: measure the profile again; `tidepool model show` has both times.",
                unit="none",
                queries={
                    "{{model}} in {{region}} on {{gpu_type}}": f"{_TBT_RATIO} and topk(10, abs(ln({_TBT_RATIO})))"
                },
                page="models",
                width=12,
            ),
        ),
        "Loops": (
            Panel(
                title="Time since a loop's last success",
                about="It rises to the loop's period and falls. One that only rises: its process is down, or its runs"
                " fail; `tidepool status` has the last error.",
                unit="s",
                queries={"{{loop}}": "time() - max by (loop) (tidepool_loop_last_success_timestamp_seconds)"},
                page="overview",
                width=12,
            ),
            Panel(
                title="Late loops",
                about="Loops that have not succeeded for too long. `plan` and `scale` late: the fleet does not follow"
                " demand.",
                unit="none",
                queries={"{{loop}}": "max by (loop) (tidepool_loop_late) > 0"},
                page="overview",
                width=12,
            ),
        ),
        "What came of it": (
            Panel(
                title="Instances ready",
                about="Ready instances by model, the ten models with most. A plan in force that changes nothing here:"
                " see whether instances fail or have no place.",
                unit="none",
                queries={
                    "{{model}}": "topk(10, sum by (model) (max by (model, region)"
                    ' (tidepool_instances{model=~"$model", region=~"$region", state="ready"})))'
                },
                page="models",
            ),
            Panel(
                title="GPUs by region",
                about="GPUs that instances or pools take, by region. A region without free ones gets no more"
                " instances.",
                unit="none",
                queries={
                    "{{region}} {{state}}": "sum by (region, state) (max by (region, gpu_type, state)"
                    ' (tidepool_gpus{region=~"$region"}))'
                },
                page="nodes",
            ),
            Panel(
                title="Instances without a place",
                about="Instances that are wanted and have no GPU. Their reasons are in `tidepool status` under Not"
                " placed.",
                unit="none",
                queries={
                    "{{model}} in {{region}}": "max by (model, region)"
                    ' (tidepool_unplaced_instances{model=~"$model", region=~"$region"})'
                },
                page="models",
            ),
        ),
    },
)
