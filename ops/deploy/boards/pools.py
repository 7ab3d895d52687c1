"""GPUs from inside: workers, switches, memory. Of agents; `region` and `instance` are labels of Prometheus' targets."""

from ops.deploy.boards.board import MODEL, NODE, REGION, Board, Panel

_AT = 'region=~"$region", instance=~"$node"'
_MODEL = _AT + ', model_name=~"$model"'


def _rate(metric: str, by: str, of: str = _AT) -> str:
    return f"sum by ({by}) (rate({metric}{{{of}}}[$__rate_interval]))"


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (model_name, le) (rate({metric}_bucket{{{_MODEL}}}[$__rate_interval])))"


POOLS = Board(
    name="pools",
    title="pools",
    about="What agents and their workers do: load, model switches, weights and KV memory.",
    page="pools",
    variables=(REGION, NODE, MODEL),
    rows={
        "Load": (
            Panel(
                title="Load of workers",
                about="Alpha of Aegaeon's Algorithm 2. Above 1 a worker cannot keep up: fewer models on the pool, or"
                " more GPUs in it.",
                unit="short",
                queries={
                    "{{instance}} {{slot}} {{kind}}": f"max by (instance, slot, kind) (tidepool_slot_load{{{_AT}}})"
                },
                page="pools",
                bad_above=1,
            ),
            Panel(
                title="Requests on workers",
                about="Requests that a worker has, and those without a first token. Waiting ones that grow: prefill"
                " is short.",
                unit="none",
                queries={
                    "{{instance}}": f"sum by (instance) (tidepool_requests_in_flight{{{_AT}}})",
                    "{{instance}} waiting": f"sum by (instance) (tidepool_prefills_waiting{{{_AT}}})",
                },
                page="pools",
            ),
            Panel(
                title="Requests by model",
                about="Requests in step batches, and waiting, by model. A model that only waits has no turn on its"
                " slots.",
                unit="none",
                queries={
                    "{{model_name}} running": f"sum by (model_name) (vllm:num_requests_running{{{_MODEL}}})",
                    "{{model_name}} waiting": f"sum by (model_name) (vllm:num_requests_waiting{{{_MODEL}}})",
                },
                page="models",
            ),
            Panel(
                title="Tokens written",
                about="Tokens streamed, by model. It falls with unchanged load when a pool switches too often.",
                unit="cps",
                queries={"{{model_name}}": _rate("vllm:generation_tokens_total", "model_name", _MODEL)},
                page="pools",
                kind="areas",
            ),
            Panel(
                title="Time between tokens on nodes, p95",
                about="From a token to the next, switches included. Compare with the objective of the tier.",
                unit="s",
                queries={"{{model_name}}": _quantile(0.95, "vllm:inter_token_latency_seconds")},
                page="models",
            ),
            Panel(
                title="Time to first token on nodes, p95",
                about="From a node's admission to the first token. What gateways see more of was spent before a node.",
                unit="s",
                queries={"{{model_name}}": _quantile(0.95, "vllm:time_to_first_token_seconds")},
                page="models",
            ),
        ),
        "Switches and weights": (
            Panel(
                title="Model switches",
                about="Switches of the running model. Many with a high load: move a hot model to GPUs of its own.",
                unit="ops",
                queries={"{{instance}}": _rate("tidepool_switches_total", "instance")},
                page="pools",
            ),
            Panel(
                title="Requests paused by another model's load",
                about="Seconds of pause a second. High: weights come from disk; give the model cache more host memory.",
                unit="percentunit",
                queries={"{{instance}}": _rate("tidepool_load_seconds_total", "instance")},
                page="pools",
            ),
            Panel(
                title="Models with weights on the GPU",
                about="Models that need no load to run. Fewer than the pool's models: some are fetched from host"
                " memory.",
                unit="none",
                queries={
                    "{{instance}} slot {{slot}}": f"max by (instance, slot) (tidepool_resident_models{{{_AT}}})",
                },
                page="pools",
            ),
            Panel(
                title="Slabs",
                about="Memory of GPUs by what it holds. No free slabs and KV pressure: fewer models, or a smaller"
                " context.",
                unit="short",
                queries={"{{state}}": f"sum by (state) (tidepool_slabs{{{_AT}}})"},
                page="pools",
                kind="areas",
            ),
            Panel(
                title="Weight layers lent to KV",
                about="Weight layers evicted to make room for KV cache. They return when pressure ends; if not, see"
                " KV use.",
                unit="none",
                queries={
                    "{{model_name}}": f"sum by (model_name) (tidepool_offloaded_weight_layers{{{_MODEL}}})",
                },
                page="pools",
            ),
            Panel(
                title="Models in host memory",
                about="Bytes of the model cache. At its limit, models are read from disk: raise"
                " TIDEPOOL_AGENT_CACHE_BYTES.",
                unit="bytes",
                queries={"{{instance}}": f"sum by (instance) (tidepool_host_cache_bytes{{{_AT}}})"},
                page="nodes",
            ),
        ),
        "KV cache": (
            Panel(
                title="KV in use",
                about="Share of a model's KV memory in use. Routing avoids a region above 70 %; above 90 % requests are"
                " preempted.",
                unit="percentunit",
                queries={
                    "{{model_name}} {{instance}}": "max by (model_name, instance)"
                    f" (vllm:kv_cache_usage_perc{{{_MODEL}}})"
                },
                page="pools",
                top=1,
                bad_above=0.9,
            ),
            Panel(
                title="KV memory by state",
                about="KV memory of GPUs and hosts. Much that is held or moving: the link to host memory is the limit.",
                unit="bytes",
                queries={"{{memory}} {{state}}": f"sum by (memory, state) (tidepool_kv_bytes{{{_AT}}})"},
                page="pools",
                kind="areas",
            ),
            Panel(
                title="KV pressure and preemptions",
                about="Times that KV blocks ran out, by what was done, and requests preempted. Steady lines: the pool"
                " needs more memory for KV, or fewer requests.",
                unit="ops",
                queries={
                    "{{action}}": _rate("tidepool_kv_pressure_events_total", "action"),
                    "preempted": f"sum(rate(vllm:num_preemptions_total{{{_AT}}}[$__rate_interval]))",
                },
                page="pools",
            ),
            Panel(
                title="Prompt tokens found in prefix caches",
                about="Share of prompt tokens whose KV was there. It falls after a drain, a restart, or with new"
                " prompts.",
                unit="percentunit",
                queries={
                    "{{model_name}}": _rate("vllm:prefix_cache_hits_total", "model_name", _MODEL)
                    + " / "
                    + _rate("vllm:prefix_cache_queries_total", "model_name", _MODEL)
                },
                page="models",
                top=1,
            ),
            Panel(
                title="KV moved from prefill to decode workers",
                about="Requests handed over on split nodes. None while requests wait: decode workers have no room.",
                unit="ops",
                queries={"{{instance}}": _rate("tidepool_handovers_total", "instance")},
                page="pools",
            ),
            Panel(
                title="Workers restarted",
                about="Worker processes that died, an hour. Above 2: read the agent's log for the last lines of the"
                " worker.",
                unit="none",
                queries={
                    "{{instance}}": f"sum by (instance) (increase(tidepool_worker_restarts_total{{{_AT}}}[1h]))",
                },
                page="nodes",
                bad_above=2,
            ),
        ),
    },
)
