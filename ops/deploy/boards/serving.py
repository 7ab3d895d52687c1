"""Interactive requests, as their clients see them."""

from ops.deploy.boards.board import MODEL, REGION, TIER, Board, Panel

_OF = 'model=~"$model", tier=~"$tier"'
_IN_REGION = _OF + ', region=~"$region"'


def _quantile(share: float, metric: str, by: str = "tier") -> str:
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({metric}_bucket{{{_OF}}}[$__rate_interval])))"


def _rate(metric: str, by: str, of: str = _OF) -> str:
    return f"sum by ({by}) (rate({metric}{{{of}}}[$__rate_interval]))"


def _kept(metric: str, by: str) -> str:
    """The share of a metric that met the objectives."""
    met = _rate(metric, by, _OF + ', met="true"')
    return f"{met} / {_rate(metric, by)}"


SERVING = Board(
    name="serving",
    title="serving",
    about="Interactive requests as clients see them: latency, objectives, refusals, tokens.",
    page="models",
    variables=(REGION, MODEL, TIER),
    rows={
        "Latency": (
            Panel(
                title="Time to first token, p50 and p95",
                about="From arrival to the first token. Rises with all else equal: instances are short, or requests"
                " leave their region; compare with load on Pools.",
                unit="s",
                queries={
                    "p50 {{tier}}": _quantile(0.5, "gen_ai_server_time_to_first_token_seconds"),
                    "p95 {{tier}}": _quantile(0.95, "gen_ai_server_time_to_first_token_seconds"),
                },
                page="models",
            ),
            Panel(
                title="Time per token, p50 and p95",
                about="Mean time between a request's tokens. Rises: too many requests share an instance, or a pool"
                " switches among too many models.",
                unit="s",
                queries={
                    "p50 {{tier}}": _quantile(0.5, "gen_ai_server_time_per_output_token_seconds"),
                    "p95 {{tier}}": _quantile(0.95, "gen_ai_server_time_per_output_token_seconds"),
                },
                page="models",
            ),
            Panel(
                title="Duration, p95",
                about="From arrival to the end. It follows the length of answers; read it beside the two on the left.",
                unit="s",
                queries={"p95 {{tier}}": _quantile(0.95, "gen_ai_server_request_duration_seconds")},
                page="requests",
            ),
            Panel(
                title="Stages before the first token, p95",
                about="Where a gateway spends time before a node has the request. A slow `limits` is Redis, a slow"
                " `admit` is waiting for room, a slow `place` is the node.",
                unit="s",
                queries={
                    "{{stage}}": "histogram_quantile(0.95, sum by (stage, le)"
                    " (rate(tidepool_request_stage_seconds_bucket[$__rate_interval])))"
                },
                page="requests",
                width=12,
            ),
            Panel(
                title="Requests being answered",
                about="Open streams by gateway. Uneven lines mean that the load balancer is uneven.",
                unit="none",
                queries={"{{instance}}": "sum by (instance) (tidepool_streams)"},
                page="overview",
                width=12,
            ),
        ),
        "Objectives": (
            Panel(
                title="Objectives missed, worst models",
                about="Share of answers that missed an objective, the ten worst models. Above 5 %: open the model in"
                " the console; its instances, their load and the reason of the last change are there.",
                unit="percentunit",
                queries={"{{model}}": f"topk(10, 1 - {_kept('tidepool_slo_requests_total', 'model')})"},
                page="models",
                width=12,
                bad_above=0.05,
            ),
            Panel(
                title="Objectives missed, by which",
                about="Answers that missed an objective: ttft (waited too long), tbt (written too slowly), failed.",
                unit="reqps",
                queries={"{{objective}}": _rate("tidepool_slo_violations_total", "objective")},
                page="models",
                kind="areas",
                width=6,
            ),
            Panel(
                title="Tokens on time",
                about="Share of tokens that came when they were due. It falls before whole answers miss their"
                " objective.",
                unit="percentunit",
                queries={"{{tier}}": _kept("tidepool_slo_tokens_total", "tier")},
                page="models",
                width=6,
                top=1,
            ),
        ),
        "Requests": (
            Panel(
                title="Requests by model",
                about="Interactive requests, the ten models with most. A sudden line of one model is a new client.",
                unit="reqps",
                queries={"{{model}}": f"topk(10, {_rate('tidepool_requests_total', 'model', _IN_REGION)})"},
                page="models",
                kind="areas",
            ),
            Panel(
                title="Outcomes other than ok",
                about="Requests that did not end well, by the code that the client got. The request log has each one.",
                unit="reqps",
                queries={"{{outcome}}": _rate("tidepool_requests_total", "outcome", _IN_REGION + ', outcome!="ok"')},
                page="requests",
            ),
            Panel(
                title="Refusals",
                about="Requests refused for lack of capacity, and by tenants' limits. The first needs instances, the"
                " second a higher limit or a quieter tenant.",
                unit="reqps",
                queries={
                    "{{model}}: {{reason}}": _rate("tidepool_refusals_total", "model, reason"),
                    "limit {{limit}}": "sum by (limit) (rate(tidepool_limit_refusals_total[$__rate_interval]))",
                    "budgets of tokens": "sum(rate(tidepool_budget_refusals_total[$__rate_interval]))",
                },
                page="tenants",
            ),
            Panel(
                title="Tokens",
                about="Tokens read and written. Cached ones cost no prefill.",
                unit="cps",
                queries={
                    "input": f"sum(rate(tidepool_input_tokens_total{{{_OF}}}[$__rate_interval]))",
                    "of them cached": f"sum(rate(tidepool_cached_input_tokens_total{{{_OF}}}[$__rate_interval]))",
                    "output": f"sum(rate(tidepool_output_tokens_total{{{_OF}}}[$__rate_interval]))",
                },
                page="tenants",
            ),
            Panel(
                title="Streams continued on another instance",
                about="Streams that outlived their node. Clients notice nothing; more than a few mean that nodes die.",
                unit="reqps",
                queries={"{{model}}": _rate("tidepool_continuations_total", "model")},
                page="nodes",
            ),
            Panel(
                title="Request records dropped",
                about="Records that the request log lost, since PostgreSQL was away or slow. The requests were served.",
                unit="cps",
                queries={
                    "{{instance}}": "sum by (instance) (rate(tidepool_request_log_dropped_total[$__rate_interval]))"
                },
                page="requests",
            ),
        ),
        "Instances": (
            Panel(
                title="Instances by model and state",
                about="Instances that serve, start or fail. Loading for more than twenty minutes, or failed: see the"
                " model.",
                unit="none",
                queries={
                    "{{model}} {{state}}": "sum by (model, state) (max by (model, region, state)"
                    ' (tidepool_instances{model=~"$model", region=~"$region"}))'
                },
                page="models",
                width=12,
            ),
            Panel(
                title="Instances without a place",
                about="Instances that are wanted and have no GPU. Add nodes, or lower minimums of other models.",
                unit="none",
                queries={
                    "{{model}} in {{region}}": "max by (model, region)"
                    ' (tidepool_unplaced_instances{model=~"$model", region=~"$region"})'
                },
                page="models",
                width=12,
            ),
        ),
    },
)
