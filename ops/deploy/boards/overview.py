"""The board to open first: is everything there, and are the objectives kept?"""

from ops.deploy.boards.board import MODEL, REGION, Board, Panel

_KEPT = (
    'sum by (tier) (rate(tidepool_slo_requests_total{{model=~"$model", met="true"}}[{window}]))'
    ' / sum by (tier) (rate(tidepool_slo_requests_total{{model=~"$model"}}[{window}]))'
)

OVERVIEW = Board(
    name="overview",
    title="overview",
    about="Whether everything is there and the objectives are kept. Each figure says what to do when it is red.",
    page="overview",
    variables=(REGION, MODEL),
    rows={
        "Now": (
            Panel(
                title="Objectives kept in the last hour",
                about="Share of answers that met their objectives, by tier. Below 95 %: see which model on Serving.",
                unit="percentunit",
                queries={"{{tier}}": _KEPT.format(window="1h")},
                page="overview",
                kind="stat",
                width=6,
                bad_below=0.95,
            ),
            Panel(
                title="Gateways that cannot serve",
                about="Gateways whose /readyz says 503 or that do not answer. Above 0: ask /readyz what is missing.",
                unit="none",
                queries={
                    "not ready": "count(tidepool_ready) - sum(tidepool_ready)",
                    "down": 'count(up{job="tidepool-gateway"}) - sum(up{job="tidepool-gateway"})',
                },
                page="overview",
                kind="stat",
                width=6,
                bad_above=1,
            ),
            Panel(
                title="Servers away",
                about="Gateways that PostgreSQL or Redis does not answer. Above 0: start the server, all else"
                " reconnects.",
                unit="none",
                queries={"{{server}}": "sum by (server) (tidepool_server_away)"},
                page="overview",
                kind="stat",
                width=6,
                bad_above=1,
            ),
            Panel(
                title="Late loops and lost nodes",
                about="Loops that have not succeeded for too long, and nodes that are silent, neither drained nor shut"
                " down. Above 0: see the loop's last error, and the nodes, in the console.",
                unit="none",
                queries={
                    "late loops": "sum(max by (loop) (tidepool_loop_late))",
                    "lost nodes": 'sum(max by (region) (tidepool_nodes{region=~"$region", state="lost"}))',
                },
                page="nodes",
                kind="stat",
                width=6,
                bad_above=1,
            ),
            Panel(
                title="Age of the plan's hour",
                about="Time since the hour of the plan in force began. Above two hours: plans fail, wait, or are not"
                " made.",
                unit="s",
                queries={"age": "time() - max(tidepool_plan_window_start_timestamp_seconds)"},
                page="plans",
                kind="stat",
                width=6,
                bad_above=7200,
            ),
            Panel(
                title="Plans that wait",
                about="Plans that wait for an operator. Above 0: review them; they are void when their hour is over.",
                unit="none",
                queries={"waiting": "max(tidepool_plans_waiting)"},
                page="plans",
                kind="stat",
                width=6,
                bad_above=1,
            ),
            Panel(
                title="Batches at risk",
                about="Batches that are predicted to miss their deadline. Above 0: the console says why for each.",
                unit="none",
                queries={"at risk": "max(tidepool_batches_at_risk)"},
                page="batches",
                kind="stat",
                width=6,
                bad_above=1,
            ),
            Panel(
                title="Instances without a place",
                about="Instances that are wanted and have no GPU. Above 0: add nodes, or lower minimums of other"
                " models.",
                unit="none",
                queries={
                    "instances": "sum(max by (model, region)"
                    ' (tidepool_unplaced_instances{model=~"$model", region=~"$region"}))'
                    " or vector(0)"
                },
                page="models",
                kind="stat",
                width=6,
                bad_above=1,
            ),
        ),
        "What fires": (
            Panel(
                title="Alerts",
                about="Alerts that fire. Each names its runbook and its page of the console.",
                unit="none",
                queries={"": 'ALERTS{alertname=~"Tidepool.*", alertstate="firing"}'},
                page="overview",
                kind="table",
                width=24,
            ),
        ),
        "Over time": (
            Panel(
                title="Objectives kept",
                about="Share of answers that met their objectives, by tier. A dip at one time in all tiers is a lost"
                " node, region or server; in one tier it is load.",
                unit="percentunit",
                queries={"{{tier}}": _KEPT.format(window="$__rate_interval")},
                page="overview",
                top=1,
            ),
            Panel(
                title="Requests",
                about="Interactive requests by how they ended. Anything but ok and cancelled that grows: see Serving.",
                unit="reqps",
                queries={
                    "{{outcome}}": "sum by (outcome)"
                    ' (rate(tidepool_requests_total{model=~"$model", region=~"$region"}[$__rate_interval]))'
                },
                page="requests",
                kind="areas",
            ),
            Panel(
                title="Batch requests open",
                about="Batch requests without a result. A line that only rises: see Queue.",
                unit="short",
                queries={"open": 'sum(max by (model) (tidepool_batch_requests_open{model=~"$model"}))'},
                page="batches",
            ),
            Panel(
                title="GPUs",
                about="GPUs by what they do. Lost ones belong to silent nodes; no free ones and instances without a"
                " place mean that capacity is short.",
                unit="none",
                queries={
                    "{{state}}": 'sum by (state) (max by (region, gpu_type, state) (tidepool_gpus{region=~"$region"}))'
                },
                page="nodes",
                kind="areas",
            ),
            Panel(
                title="Instances",
                about="Instances by state. Failed or lost ones that stay: see the model's page in the console.",
                unit="none",
                queries={
                    "{{state}}": "sum by (state) (max by (model, region, state)"
                    ' (tidepool_instances{model=~"$model", region=~"$region"}))'
                },
                page="models",
                kind="areas",
            ),
            Panel(
                title="Nodes",
                about="Nodes by state. Lost ones are silent, neither drained nor shut down: start their agents, or"
                " delete the nodes.",
                unit="none",
                queries={"{{state}}": 'sum by (state) (max by (region, state) (tidepool_nodes{region=~"$region"}))'},
                page="nodes",
                kind="areas",
            ),
        ),
    },
)
