"""`region`, `gpu`, `endpoint` and `instance`."""

from typing import Annotated

import typer

from ops.cli.deletes import delete_endpoint, delete_gpu, delete_region
from ops.cli.examples import examples
from ops.cli.listing import print_pages
from ops.client.api import connected, path_to
from ops.client.screen import AsJson, Columns, bytes_text, print_answer, print_json, print_table, same, unplaced_text

regions = typer.Typer(no_args_is_help=True, help="Regions, in the order that traffic prefers them.")
gpus = typer.Typer(no_args_is_help=True, help="GPU types, with memory and cost of one GPU.")
endpoints = typer.Typer(no_args_is_help=True, help="Endpoints: models offered in regions.")
instances = typer.Typer(no_args_is_help=True, help="Instances: copies of models on slots.")

INSTANCE_COLUMNS = {
    "instance": "id",
    **same("model", "region", "node", "slot", "pooled", "engine"),
    "wanted": "desired",
    "state": "state",
    "waits for": "waits_for",
    "error": "error",
}


@regions.command("add")
@examples("tidepool region add us-east --position 0")
def add_region(
    context: typer.Context,
    name: str,
    position: Annotated[int | None, typer.Option(min=0, help="Lower is preferred; new ones go last.")] = None,
    as_json: AsJson = False,
) -> None:
    """Register a region, or move it in the order."""
    with connected(context) as api:
        answer = api.put(path_to("/admin/regions", name), {} if position is None else {"position": position})
    print_answer(answer, f"region {name} is registered at position {answer['position']}", as_json=as_json)


@regions.command("list")
@examples("tidepool region list --json")
def list_regions(context: typer.Context, as_json: AsJson = False) -> None:
    """List regions."""
    with connected(context) as api:
        answer = api.pages("/admin/regions")
    if as_json:
        print_json(answer)
        return
    rows = sorted(answer["data"], key=lambda row: (row["position"], row["name"]))
    print_table("Regions", {"region": "name", "position": "position"}, rows)


@regions.command("latency")
@examples("tidepool region latency us-east us-west 62")
def set_latency(
    context: typer.Context,
    origin: str,
    destination: str,
    ms: Annotated[float, typer.Argument(min=0, max=60_000, help="Round-trip time in milliseconds.")],
    one_way: Annotated[bool, typer.Option("--one-way", help="Set this direction only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set the latency between two regions: traffic that its home region cannot take tries the nearest region first."""
    pairs = [(origin, destination)] if one_way else [(origin, destination), (destination, origin)]
    with connected(context) as api:
        answers = [
            api.put("/admin/region-latencies", {"origin": start, "destination": end, "ms": ms}) for start, end in pairs
        ]
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        typer.echo(f"{answer['origin']} to {answer['destination']}: {answer['ms']:g} ms")


@regions.command("latencies")
@examples("tidepool region latencies")
def list_latencies(context: typer.Context, as_json: AsJson = False) -> None:
    """List latencies between regions."""
    print_pages(
        context,
        "/admin/region-latencies",
        "Latencies",
        {"from": "origin", "to": "destination", "ms": "ms"},
        as_json=as_json,
    )


@gpus.command("add")
@examples("tidepool gpu add H800 --memory-gib 80 --cost-per-hour 2.5")
def add_gpu(
    context: typer.Context,
    name: str,
    memory_gib: Annotated[float, typer.Option(min=0.001, max=1_000_000, help="Memory of one GPU in GiB.")],
    cost_per_hour: Annotated[float, typer.Option(min=0, help="Cost of one GPU for an hour.")],
    as_json: AsJson = False,
) -> None:
    """Register a GPU type, or change what it costs."""
    body = {"memory_bytes": int(memory_gib * 2**30), "cost_per_hour": cost_per_hour}
    with connected(context) as api:
        answer = api.put(path_to("/admin/gpu-types", name), body)
    print_answer(answer, f"GPU type {name} is registered", as_json=as_json)


@gpus.command("list")
@examples("tidepool gpu list")
def list_gpus(context: typer.Context, as_json: AsJson = False) -> None:
    """List GPU types."""
    columns: Columns = {
        "GPU": "name",
        "memory": lambda row: bytes_text(row["memory_bytes"]),
        "cost per hour": "cost_per_hour",
    }
    print_pages(context, "/admin/gpu-types", "GPU types", columns, as_json=as_json)


@endpoints.command("set")
@examples("tidepool endpoint set llama-8b us-east --min 1 --max 8")
def set_endpoint(
    context: typer.Context,
    model: str,
    region: str,
    minimum: Annotated[int, typer.Option("--min", min=0, help="Instances kept at least.")] = 0,
    maximum: Annotated[int, typer.Option("--max", min=0, help="Instances at most.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Offer a model in a region, with limits on its instances."""
    body = {"model": model, "region": region, "instances_min": minimum, "instances_max": maximum}
    with connected(context) as api:
        answer = api.put("/admin/endpoints", body)
    print_answer(answer, f"{model} in {region} may have {minimum} to {maximum} instances", as_json=as_json)


@endpoints.command("list")
@examples("tidepool endpoint list")
def list_endpoints(context: typer.Context, as_json: AsJson = False) -> None:
    """List endpoints."""
    columns: Columns = {
        **same("model", "region"),
        "min": "instances_min",
        "max": "instances_max",
        "not placed": lambda row: "\n".join(unplaced_text(each) for each in row["unplaced"] or ()) or None,
    }
    print_pages(context, "/admin/endpoints", "Endpoints", columns, as_json=as_json)


@instances.command("list")
@examples("tidepool instance list --all")
def list_instances(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Stopped ones too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List instances."""
    print_pages(context, "/admin/instances", "Instances", INSTANCE_COLUMNS, as_json=as_json, live_only=not everything)


regions.command("delete")(delete_region)
gpus.command("delete")(delete_gpu)
endpoints.command("delete")(delete_endpoint)
