"""`model`: checkpoints, their profiles on GPU types and their endpoints in regions."""

from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any, get_args
from urllib.parse import urlencode

import typer

from dataplane.protocol.messages import EngineChoice, Task
from dataplane.protocol.parsers import ReasoningParserName, ToolParserName
from ops.cli.deletes import delete_model
from ops.cli.examples import examples
from ops.cli.listing import print_pages
from ops.cli.model_adapters import (
    ON_BASE,
    WithBase,
    base_text,
    describe_adapter,
    put_with_base,
    require_no_place,
    require_source,
    sizes_of,
    taken_over,
)
from ops.cli.model_convert import convert_model, folder_of
from ops.cli.model_copies import copy_endpoints, copy_profiles, profiles_of
from ops.cli.model_latencies import LatencyFiles, latencies_of
from ops.cli.model_options import parse_engine_rates, parse_objective, parse_rate, require_choice
from ops.client.api import Api, CommandError, connected, path_to
from ops.client.screen import (
    AsJson,
    Columns,
    bytes_text,
    notes,
    print_answer,
    print_fields,
    print_json,
    print_table,
    same,
)
from ops.local.checkpoints import CheckpointError, describe_checkpoint

Rows = Sequence[Mapping[str, Any]]
Rates = Annotated[
    list[str] | None,
    typer.Option(metavar="GPU=NUMBER", help="Input tokens/s of one instance on a GPU type. May be repeated."),
]
Gpus = Annotated[int, typer.Option(min=1, help="GPUs that one instance takes.")]
Source = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        help="Checkpoint folder that nodes see under the same path; or FILE.gguf, which is made into such a folder; or"
        " https://HOST/PATH/ or hf://ORG/NAME[@REVISION], which nodes fetch.",
    ),
]
Adapter = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="LoRA adapter as PEFT writes it, in a folder that nodes see under the same path. It takes over the base's"
        " profiles where none are named.",
    ),
]
ConvertTo = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Convert FILE.gguf into this folder; default: next to the file.")
]
LoadTime = Annotated[float, typer.Option(min=0, help="Seconds to load it within a region.")]
Objectives = Annotated[
    list[str] | None,
    typer.Option(metavar="TIER=TTFT,TBT", help="Objectives in seconds, where they differ. May be repeated."),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="torch|vllm|auto",
        help="What dedicated instances run on, where the node has it; auto: by --engine-rates, else what the node"
        " prefers. Pooled ones: torch.",
    ),
]
EngineRates = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GPU=TORCH,VLLM",
        help="Tokens/s of the torch engine and of vLLM on a GPU type, measured side by side (`python -m"
        " ops.bench.engine.engines`). May be repeated.",
    ),
]
TaskChoice = Annotated[
    str | None,
    typer.Option(
        metavar="generate|embed|score",
        help="What it answers with; default: what the checkpoint's files say. embed: a model without its head; score:"
        " one output of a head, or yes and no of a causal model.",
    ),
]
ToolParserChoice = Annotated[
    str | None,
    typer.Option(
        "--tool-parser",
        metavar="|".join(get_args(ToolParserName)),
        help="How it writes tool calls; default: as its chat template suggests. json: without markers.",
    ),
]
ReasoningParserChoice = Annotated[
    str | None,
    typer.Option(
        "--reasoning-parser",
        metavar="|".join(get_args(ReasoningParserName)),
        help="How it writes reasoning; default: as its chat template suggests. deepseek_r1: always first.",
    ),
]
Like = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="Take over this model's profiles and regions where none are named; no instance starts."
    ),
]
PrivateHosts = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST|NETWORK", help="Read from here though it is not public. May be repeated."),
]
models = typer.Typer(no_args_is_help=True, help="Models: checkpoints in Hugging Face format, or GGUF files.")
models.command("convert")(convert_model)


@models.command("add")
@examples(
    "tidepool model add qwen3-8b --path /models/qwen3-8b --tokens-per-s H800=12000 --region us-east --max 8",
    "tidepool model add qwen3-8b --path /models/qwen3-8b --tokens-per-s H800=12000 --latency ops/profiles/h800.toml",
    "tidepool model add qwen3-8b --path hf://Qwen/Qwen3-8B --tokens-per-s H800=12000 --slo IW-F=0.5,0.05",
    "tidepool model add qwen3-8b --path /models/qwen3-8b --engine vllm      once it has a profile",
    "tidepool model add qwen3-8b-r2 --path /models/qwen3-8b-r2 --like qwen3-8b      then tidepool rollout start",
    "tidepool model add my-tune --path /models/my-tune --tool-parser hermes --reasoning-parser none",
    "tidepool model add helpdesk --base qwen3-8b --adapter /models/helpdesk --region us-east      a LoRA adapter",
    "tidepool model add helpdesk --base qwen3-8b --adapter /models/helpdesk --with-base      on the base's instances",
    "tidepool model add smol --path SmolLM2-135M-Instruct.Q4_1.gguf --to /models/smol --tokens-per-s cpu=2000",
)
def add_model(
    context: typer.Context,
    name: str,
    path: Source = None,
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="The model that --adapter is added to.")] = None,
    adapter: Adapter = None,
    with_base: WithBase = False,
    tokens_per_s: Rates = None,
    gpus: Gpus = 1,
    load_time_s: LoadTime = 60.0,
    region: Annotated[list[str] | None, typer.Option(help="Offer it in this region. May be repeated.")] = None,
    minimum: Annotated[int, typer.Option("--min", min=0, help="Instances kept in each region.")] = 0,
    maximum: Annotated[int, typer.Option("--max", min=0, help="Instances at most in each region.")] = 4,
    like: Like = None,
    latency: LatencyFiles = None,
    slo: Objectives = None,
    engine: Engine = "auto",
    engine_rates: EngineRates = None,
    task: TaskChoice = None,
    tool_parser: ToolParserChoice = None,
    reasoning_parser: ReasoningParserChoice = None,
    private_host: PrivateHosts = None,
    to: ConvertTo = None,
    as_json: AsJson = False,
) -> None:
    """Register a model. Its sizes are read from config.json and the safetensors headers; no weights are fetched."""
    require_source(path, base, adapter)
    require_no_place(base, with_base=with_base, regions=region, like=like, rates=tokens_per_s)
    rates = dict(parse_rate(text) for text in tokens_per_s or [])
    measured = parse_engine_rates(engine_rates or [], list(rates))
    _require_choices(engine, task, tool_parser, reasoning_parser)
    if minimum > maximum:
        raise typer.BadParameter(f"--min {minimum} is above --max {maximum}")
    objectives = dict(parse_objective(text) for text in slo or [])
    body = _described(path or "", to, private_host or [], task) if adapter is None else describe_adapter(adapter)
    body |= {"slo": objectives or None, "engine": engine}
    parsers = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    with connected(context) as api:
        _require_known(api, gpu_types=list(rates), regions=region or [])
        sizes = body if base is None else api.get(path_to("/admin/models", base))
        body |= parsers if base is None else taken_over(sizes, parsers, with_base=with_base)
        if with_base:
            put_with_base(api, name, body, as_json=as_json)
            return
        latencies = latencies_of(latency or [], list(rates), sizes, gpus=gpus)
        copied = [] if (model := like or base) is None else profiles_of(api, model, but=rates)
        profiled = [*rates, *(row["gpu_type"] for row in copied)] or _require_profiles(api, name)
        made: dict[str, Any] = {"model": api.put(path_to("/admin/models", name), body)}
        made["profiles"] = _put_profiles(api, name, rates, latencies, measured, gpus=gpus, load_time_s=load_time_s)
        made["profiles"] += copy_profiles(api, copied, name)
        endpoint = {"model": name, "instances_min": minimum, "instances_max": maximum}
        made["endpoints"] = _put_endpoints(api, endpoint, region or [])
        made["endpoints"] += [] if like is None else copy_endpoints(api, like, name, but=region or [])
    _say_added(made, profiled, minimum=minimum, as_json=as_json)


@models.command("profile")
@examples(
    "tidepool model profile qwen3-8b --tokens-per-s H800=12000 --latency ops/profiles/h800.toml",
    "tidepool model profile qwen3-8b --tokens-per-s L40S=5000 --latency auto",
    "tidepool model profile qwen3-8b --tokens-per-s H800=15000 --engine-rates H800=9000,15000",
)
def set_profile(
    context: typer.Context,
    name: str,
    tokens_per_s: Rates = None,
    gpus: Gpus = 1,
    load_time_s: LoadTime = 60.0,
    latency: LatencyFiles = None,
    engine_rates: EngineRates = None,
    as_json: AsJson = False,
) -> None:
    """Replace a model's profiles on the given GPU types. Other GPU types keep theirs."""
    rates = dict(parse_rate(text) for text in tokens_per_s or [])
    if not rates:
        raise typer.BadParameter("--tokens-per-s must name at least one GPU type")
    measured = parse_engine_rates(engine_rates or [], list(rates))
    with connected(context) as api:
        latencies = latencies_of(latency or [], list(rates), sizes_of(api, name), gpus=gpus)
        _require_known(api, gpu_types=list(rates), regions=[])
        made = _put_profiles(api, name, rates, latencies, measured, gpus=gpus, load_time_s=load_time_s)
    if as_json:
        print_json(made)
        return
    for row in made:
        rate = f"{row['tokens_per_s']:g} tokens/s; latency: {_latency_text(row)}; engines: {_engine_text(row)}"
        typer.echo(f"{name} on {row['gpu_type']}: {rate}")


@models.command("list")
@examples("tidepool model list")
def list_models(context: typer.Context, as_json: AsJson = False) -> None:
    """List models."""
    columns: Columns = {
        "model": "name",
        "architecture": "architecture",
        "weights": lambda row: bytes_text(row["weights_bytes"]),
        "KV per token": lambda row: bytes_text(row["kv_bytes_per_token"]),
        "context": "context_tokens",
        **same("task", "engine", "base", "path", "owner"),
    }
    print_pages(context, "/admin/models", "Models", columns, as_json=as_json)


@models.command("show")
@examples("tidepool model show qwen3-8b")
def show_model(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Show a model, its profiles and endpoints, and which engine its instances run on and why."""
    with connected(context) as api:
        model = api.get(path_to("/admin/models", name))
        summaries = api.pages("/admin/model-summaries", base=name)["data"]
        profiles = [row for row in api.pages("/admin/profiles")["data"] if row["model"] == name]
        corrections = api.pages("/admin/profile-corrections", model=name)["data"]
        latencies = api.pages("/admin/latency-comparisons", model=name)["data"]
        endpoints = [row for row in api.pages("/admin/endpoints")["data"] if row["model"] == name]
        instances = [row for row in api.pages("/admin/instances")["data"] if row["model"] == name]
        beside = api.pages("/admin/adapter-instances", model=name)["data"] if model.get("with_base") else []
    adapters = [row["name"] for row in summaries if row.get("base") == name]
    if as_json:
        answers = {"profiles": profiles, "corrections": corrections, "endpoints": endpoints, "instances": instances}
        answers |= {"adapters": adapters, "adapter_instances": beside, "latencies": latencies}
        print_json({"model": model, **answers})
        return
    suggested = "as its chat template suggests"
    print_fields(
        [
            ("model", name),
            ("sizes", _sizes_text(model)),
            ("path", model["path"]),
            *([("LoRA adapter of", base_text(model))] if model.get("base") else []),
            *([("LoRA adapters", ", ".join(adapters))] if adapters else []),
            ("engine", model["engine"]),
            ("tool parser", model.get("tool_parser") or suggested),
            ("reasoning parser", model.get("reasoning_parser") or suggested),
        ]
    )
    if model.get("with_base"):
        print_table(f"On instances of {model['base']}", ON_BASE, beside)
        return
    _print_profiles(profiles, corrections, latencies)
    print_table("Endpoints", {"region": "region", "min": "instances_min", "max": "instances_max"}, endpoints)
    columns: Columns = {"node": "node", "slot": "slot", "state": "state", "engine": "engine"}
    print_table("Instances", {**columns, "why": "engine_reason"}, instances)


def _print_profiles(profiles: Rows, corrections: Rows, latencies: Rows) -> None:
    """What is stated, what plans count instead, and how long requests took beside what that predicts."""
    rates: Columns = {
        "GPU": "gpu_type",
        "tokens/s": "tokens_per_s",
        "GPUs": "gpus",
        "load time (s)": "load_time_s",
        "latency": _latency_text,
        "engines": _engine_text,
    }
    print_table("Profiles", rates, profiles)
    corrected: Columns = {
        "GPU": "gpu_type",
        "plans count": lambda row: f"{row['tokens_per_s']:,.0f}",
        "observed": lambda row: "unknown" if row["estimate"] is None else f"{row['estimate']:,.0f}",
        "prefill, decode": lambda row: f"x {row['prefill_factor']:.2f}, x {row['decode_factor']:.2f}",
        "why": "reason",
    }
    if corrections:
        print_table("Tokens/s, corrected by what instances do", corrected, corrections)
    compared: Columns = {
        "region": "region",
        "GPU": "gpu_type",
        "first tokens, p50 and p95": lambda row: "; ".join(starmap(_tier_text, row["tiers"].items())),
        "beside the profile": "reason",
    }
    if latencies:
        print_table("Latency of the last hour, beside what the profile predicts", compared, latencies)


def _tier_text(tier: str, times: Mapping[str, Any]) -> str:
    return f"{tier} {1000 * times['ttft_p50_s']:,.0f} and {1000 * times['ttft_p95_s']:,.0f} ms"


@models.command("reset-profile")
@examples("tidepool model reset-profile qwen3-8b H800")
def reset_profile(context: typer.Context, name: str, gpu_type: str, as_json: AsJson = False) -> None:
    """Let a model's profile count as stated: forget its correction and what was observed on that GPU type."""
    query = urlencode({"model": name, "gpu_type": gpu_type})
    with connected(context) as api:
        answer = api.delete(f"/admin/profile-corrections?{query}")
    rate = f"{answer['stated_tokens_per_s']:,.0f} tokens/s, as stated"
    print_answer(answer, f"{name} on {gpu_type} counts {rate}, until there is new evidence", as_json=as_json)


def _require_choices(engine: str, task: str | None, tool_parser: str | None, reasoning_parser: str | None) -> None:
    require_choice("--engine", engine, EngineChoice)
    require_choice("--task", task, Task)
    require_choice("--tool-parser", tool_parser, ToolParserName)
    require_choice("--reasoning-parser", reasoning_parser, ReasoningParserName)


def _say_added(made: dict[str, Any], profiled: list[str], *, minimum: int, as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    regions = [row["region"] for row in made["endpoints"]]
    typer.echo(f"model {made['model']['name']} is registered: {_sizes_text(made['model'])}")
    typer.echo(f"profiles: {', '.join(profiled)}; regions: {', '.join(regions) or 'none'}")
    if regions and not minimum:
        notes().print("no instance starts until a plan or demand needs one; --min 1 keeps an instance ready")


def _put_profiles(
    api: Api,
    name: str,
    rates: dict[str, float],
    latencies: dict[str, dict[str, Any]],
    measured: dict[str, dict[str, float]],
    *,
    gpus: int,
    load_time_s: float,
) -> list[dict[str, Any]]:
    profile = {"model": name, "gpus": gpus, "load_time_s": load_time_s}
    profiles = [
        profile
        | {"gpu_type": gpu_type, "tokens_per_s": rate}
        | {"latency": latencies.get(gpu_type), "engine_rates": measured.get(gpu_type)}
        for gpu_type, rate in rates.items()
    ]
    return [api.put("/admin/profiles", body) for body in profiles]


def _described(path: str, to: Path | None, private_hosts: list[str], task: Any) -> dict[str, Any]:
    try:
        return describe_checkpoint(folder_of(path, to), tuple(private_hosts), task=task)
    except CheckpointError as error:
        raise CommandError(str(error)) from error


def _put_endpoints(api: Api, endpoint: dict[str, Any], regions: list[str]) -> list[dict[str, Any]]:
    try:
        return [api.put("/admin/endpoints", endpoint | {"region": region}) for region in regions]
    except CommandError as error:
        message = f"model {endpoint['model']} is registered, but not offered in every region: {error}"
        raise CommandError(message, status=error.status) from error


def _latency_text(profile: Mapping[str, Any]) -> str:
    latency = profile["latency"]
    if latency is None:
        return "none, never pooled"
    return f"{latency['source']}; switch {latency['switch_s']:.2f} s"


def _engine_text(profile: Mapping[str, Any]) -> str:
    rates = profile["engine_rates"]
    return "not measured" if rates is None else f"torch {rates['torch']:g}, vLLM {rates['vllm']:g} tokens/s"


def _sizes_text(model: dict[str, Any]) -> str:
    return (
        f"{model['architecture']} to {model['task']}, weights {bytes_text(model['weights_bytes'])},"
        f" KV {bytes_text(model['kv_bytes_per_token'])} a token, context {model['context_tokens']} tokens"
    )


def _require_known(api: Api, *, gpu_types: list[str], regions: list[str]) -> None:
    """Check that the GPU types and regions exist before anything is registered."""
    for gpu_type in gpu_types:
        api.get(path_to("/admin/gpu-types", gpu_type))
    for region in regions:
        api.get(path_to("/admin/regions", region))


def _require_profiles(api: Api, name: str) -> list[str]:
    """The GPU types on which a model that is known already has a profile, where the command names none.

    Raises:
        CommandError: it has none; nothing could place it.
    """
    known = [row["gpu_type"] for row in api.pages("/admin/profiles")["data"] if row["model"] == name]
    if not known:
        raise CommandError(
            f"--tokens-per-s GPU=NUMBER is missing, and {name} has no profile yet: plans and scaling place a model by"
            " its input tokens/s on a GPU type. `tidepool node profile DIR --out FILE.toml` measures its step times on"
            " a node; the rate is what one instance carries within its objectives (too low a rate costs GPUs, too high"
            " a rate breaks objectives)"
        )
    return known


models.command("delete")(delete_model)
