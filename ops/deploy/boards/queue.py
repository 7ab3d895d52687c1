"""The batch queue: what waits, how fast it is worked off, and whether deadlines are kept."""

from ops.deploy.boards.board import MODEL, Board, Panel

_OPEN = 'max by (model) (tidepool_batch_requests_open{model=~"$model"})'
_RATE = 'max by (model) (rate(tidepool_batch_requests_finished_total{model=~"$model"}[30m]))'

QUEUE = Board(
    name="queue",
    title="queue",
    about="The batch queue: what waits, how fast it is worked off, and whether deadlines are kept.",
    page="batches",
    variables=(MODEL,),
    rows={
        "Now": (
            Panel(
                title="Batches at risk",
                about="Batches that are predicted to miss their deadline. Above 0: `tidepool batch show` says why.",
                unit="none",
                queries={"at risk": "max(tidepool_batches_at_risk)"},
                page="batches",
                kind="stat",
                width=6,
                bad_above=1,
            ),
            Panel(
                title="Longest predicted delay",
                about="By how much the latest batch will miss its deadline. Pin instances for its model until it is"
                " done.",
                unit="s",
                queries={"late": "max(tidepool_batch_predicted_late_seconds)"},
                page="batches",
                kind="stat",
                width=6,
                bad_above=1,
            ),
            Panel(
                title="Requests that dispatchers hold",
                about="Batch requests on their way. 0 with an open queue: no dispatcher runs, or nothing has room.",
                unit="none",
                queries={"running": "max(tidepool_batch_requests_running)"},
                page="batches",
                kind="stat",
                width=6,
            ),
            Panel(
                title="Dispatcher's last success",
                about="Time since any dispatcher released or stored requests. Above a minute: start `tidepool"
                " dispatcher`.",
                unit="s",
                queries={"ago": 'time() - max(tidepool_loop_last_success_timestamp_seconds{loop="dispatcher"})'},
                page="overview",
                kind="stat",
                width=6,
                bad_above=75,
            ),
        ),
        "Queue": (
            Panel(
                title="Open requests",
                about="Batch requests without a result, by model. A line that only rises: compare with the rate"
                " beside it.",
                unit="short",
                queries={"{{model}}": _OPEN},
                page="batches",
                kind="areas",
                width=12,
            ),
            Panel(
                title="Requests completed",
                about="Batch requests that got their result. None of one model: it has no instance that takes batch"
                " work.",
                unit="reqps",
                queries={"{{model}}": _RATE},
                page="batches",
                kind="areas",
                width=12,
            ),
            Panel(
                title="Time to work the queue off",
                about="Open requests at the rate of the last half hour. Above a day: pin instances, or cancel what"
                " may wait.",
                unit="s",
                queries={"{{model}}": f"{_OPEN} / {_RATE}"},
                page="batches",
                width=8,
                bad_above=86400,
            ),
            Panel(
                title="Batches",
                about="Batches that have not ended, by state. Many in validating or finalizing: the dispatcher's log"
                " says why.",
                unit="none",
                queries={"{{state}}": "max by (state) (tidepool_batches_open)"},
                page="batches",
                kind="areas",
            ),
            Panel(
                title="Batches at risk over time",
                about="Batches that are predicted to miss their deadline. It should fall after instances were added.",
                unit="none",
                queries={"at risk": "max(tidepool_batches_at_risk)"},
                page="batches",
            ),
        ),
        "Flex": (
            Panel(
                title="Flex requests that wait",
                about="Requests of tier flex that wait for spare capacity, by gateway. They are refused when it does"
                " not come.",
                unit="none",
                queries={"{{instance}}": "sum by (instance) (tidepool_flex_waiting)"},
                page="requests",
                width=12,
            ),
            Panel(
                title="Flex requests refused",
                about="Requests of tier flex for which there was no spare capacity. They may be tried again, or sent"
                " as batch.",
                unit="reqps",
                queries={
                    "{{model}}": "sum by (model)"
                    ' (rate(tidepool_refusals_total{model=~"$model", tier="NIW"}[$__rate_interval]))'
                },
                page="requests",
                width=12,
            ),
        ),
    },
)
