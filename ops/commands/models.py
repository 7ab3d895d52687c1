"""`model`: register checkpoints, and what they do on GPU types and in regions."""

from typing import Annotated, Any

import typer

from ops.checkpoints import CheckpointError, describe_checkpoint
from ops.commands.api import Api, CommandError, connected
from ops.commands.screen import AsJson, Columns, bytes_text, print_fields, print_json, print_table

models = typer.Typer(no_args_is_help=True, help="Models: checkpoints in Hugging Face format.")


@models.command("add")
def add_model(
    context: typer.Context,
    name: str,
    path: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="Checkpoint folder that nodes see under the same path; or https://HOST/PATH/ or hf://ORG/NAME[@REVISION],"
            " which nodes fetch.",
        ),
    ],
    tokens_per_s: Annotated[
        list[str] | None,
        typer.Option(metavar="GPU=NUMBER", help="Input tokens/s of one instance on a GPU type. May be repeated."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that one instance takes.")] = 1,
    load_time_s: Annotated[float, typer.Option(min=0, help="Seconds to load it within a region.")] = 60.0,
    region: Annotated[list[str] | None, typer.Option(help="Offer it in this region. May be repeated.")] = None,
    minimum: Annotated[int, typer.Option("--min", min=0, help="Instances kept in each region.")] = 0,
    maximum: Annotated[int, typer.Option("--max", min=0, help="Instances at most in each region.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Register a model. Its sizes are read from config.json and the safetensors headers; the weights are not fetched.

    \b
    Examples:
      tidepool model add qwen3-8b --path /models/qwen3-8b
      tidepool model add qwen3-8b --path /models/qwen3-8b --tokens-per-s H800=12000 --region us-east --max 8
      tidepool model add qwen3-8b --path hf://Qwen/Qwen3-8B
    """
    rates = dict(_rate(text) for text in tokens_per_s or [])
    if minimum > maximum:
        raise typer.BadParameter(f"--min {minimum} is above --max {maximum}")
    try:
        body = describe_checkpoint(path)
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    with connected(context) as api:
        _require_known(api, gpu_types=list(rates), regions=region or [])
        made: dict[str, Any] = {"model": api.put(f"/admin/models/{name}", body)}
        profile = {"model": name, "gpus": gpus, "load_time_s": load_time_s}
        made["profiles"] = [
            api.put("/admin/profiles", profile | {"gpu_type": gpu_type, "tokens_per_s": rate})
            for gpu_type, rate in rates.items()
        ]
        endpoint = {"model": name, "instances_min": minimum, "instances_max": maximum}
        made["endpoints"] = [api.put("/admin/endpoints", endpoint | {"region": place}) for place in region or []]
    if as_json:
        print_json(made)
        return
    typer.echo(f"model {name} is registered: {_words(made['model'])}")
    typer.echo(f"profiles: {', '.join(rates) or 'none'}; regions: {', '.join(region or []) or 'none'}")


@models.command("list")
def list_models(context: typer.Context, as_json: AsJson = False) -> None:
    """List models.

    \b
    Example:
      tidepool model list
    """
    with connected(context) as api:
        answer = api.pages("/admin/models")
    if as_json:
        print_json(answer)
        return
    columns: Columns = {
        "model": "name",
        "architecture": "architecture",
        "weights": lambda row: bytes_text(row["weights_bytes"]),
        "KV per token": lambda row: bytes_text(row["kv_bytes_per_token"]),
        "context": "context_tokens",
        "path": "path",
    }
    print_table("Models", columns, answer["data"])


@models.command("show")
def show_model(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Show a model, what it does on GPU types, and where it is offered.

    \b
    Example:
      tidepool model show qwen3-8b
    """
    with connected(context) as api:
        model = api.get(f"/admin/models/{name}")
        profiles = [row for row in api.pages("/admin/profiles")["data"] if row["model"] == name]
        endpoints = [row for row in api.pages("/admin/endpoints")["data"] if row["model"] == name]
    if as_json:
        print_json({"model": model, "profiles": profiles, "endpoints": endpoints})
        return
    print_fields([("model", name), ("sizes", _words(model)), ("path", model["path"])])
    rates = {"GPU": "gpu_type", "tokens/s": "tokens_per_s", "GPUs": "gpus", "load time (s)": "load_time_s"}
    print_table("Profiles", rates, profiles)
    print_table("Endpoints", {"region": "region", "min": "instances_min", "max": "instances_max"}, endpoints)


def _words(model: dict[str, Any]) -> str:
    return (
        f"{model['architecture']}, weights {bytes_text(model['weights_bytes'])},"
        f" KV {bytes_text(model['kv_bytes_per_token'])} a token, context {model['context_tokens']} tokens"
    )


def _rate(text: str) -> tuple[str, float]:
    gpu_type, equals, number = text.rpartition("=")
    try:
        rate = float(number)
    except ValueError:
        rate = 0.0
    if not equals or not gpu_type or not rate > 0:
        raise typer.BadParameter(f"--tokens-per-s takes GPU=NUMBER above 0, such as H800=12000, not '{text}'")
    return gpu_type, rate


def _require_known(api: Api, *, gpu_types: list[str], regions: list[str]) -> None:
    """Nothing is registered by half: what the model refers to is looked up first."""
    for gpu_type in gpu_types:
        api.get(f"/admin/gpu-types/{gpu_type}")
    for region in regions:
        api.get(f"/admin/regions/{region}")
