"""`model`, `endpoint`, `region`, `gpu`, `node` and `what-if delete`; `--drain` empties an endpoint or a node first."""

import sys
from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.ids import RunId, whole_id
from ops.client.api import Api, CommandError, connected, path_to
from ops.client.drains import drain_endpoint, instances_left, wait_until_none
from ops.client.screen import AsJson, print_answer

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; without a terminal nothing is asked.")]
Drain = Annotated[bool, typer.Option("--drain", help="Empty it first, and wait for that. Ctrl-C leaves it draining.")]


@examples("tidepool model delete qwen3-8b --drain")
def delete_model(
    context: typer.Context, name: str, drain: Drain = False, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Delete a model, with its profiles. Demand, forecasts, plans and results stay.

    \b
    Refused while it is offered anywhere, while open batches ask for it, and while a key is for it alone. --drain
    deletes its endpoints first.
    """
    _confirm(f"model {name}{' and all its endpoints' if drain else ''}", yes=yes or as_json)
    with connected(context) as api:
        api.get(path_to("/admin/models", name))
        if drain:
            for row in api.pages("/admin/endpoints")["data"]:
                if row["model"] == name:
                    drain_endpoint(api, name, row["region"])
                    _delete_endpoint(api, name, row["region"])
        answer = api.delete(path_to("/admin/models", name))
    print_answer(answer, f"model {name} is deleted", as_json=as_json)


@examples("tidepool endpoint delete qwen3-8b us-east --drain")
def delete_endpoint(
    context: typer.Context, model: str, region: str, drain: Drain = False, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Stop offering a model in a region. Refused while the endpoint has instances or is pinned."""
    _confirm(f"endpoint {model} in {region}", yes=yes or as_json)
    with connected(context) as api:
        if drain:
            drain_endpoint(api, model, region)
        answer = _delete_endpoint(api, model, region)
    print_answer(answer, f"{model} is not offered in {region} any more", as_json=as_json)


@examples("tidepool region delete us-east")
def delete_region(context: typer.Context, name: str, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a region, with its latencies. Refused while it has nodes or endpoints."""
    _delete(context, path_to("/admin/regions", name), f"region {name}", yes=yes, as_json=as_json)


@examples("tidepool gpu delete H800")
def delete_gpu(context: typer.Context, name: str, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a GPU type, with the profiles of models on it. Refused while nodes have it."""
    _delete(context, path_to("/admin/gpu-types", name), f"GPU type {name}", yes=yes, as_json=as_json)


@examples("tidepool node delete us-east-1 --drain")
def delete_node(
    context: typer.Context, name: str, drain: Drain = False, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Delete a node, and revoke the keys of this node only.

    \b
    Refused while it holds instances, and while its agent runs. It may join again: `tidepool key create NAME --role node
    --node NAME`, and start its agent with that key. --drain waits until it is empty and its agent is stopped.
    """
    _confirm(f"node {name}", yes=yes or as_json)
    with connected(context) as api:
        if drain:
            _drain_node(api, name)
        answer = api.delete(path_to("/admin/nodes", name))
    print_answer(answer, f"node {name} is deleted", as_json=as_json)


@examples("tidepool what-if delete whatif_0190f3c2a7b57c1e8d2f4b6a8c0e1f23")
def delete_run(context: typer.Context, run_id: RunId, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a what-if run, with its figures. Refused while it is queued or running: cancel it first."""
    with connected(context) as api:
        run_id = whole_id(api, "whatif", run_id)
    _delete(context, path_to("/admin/what-if", run_id), f"what-if run {run_id}", yes=yes, as_json=as_json)


def _delete(context: typer.Context, path: str, what: str, *, yes: bool, as_json: bool) -> None:
    _confirm(what, yes=yes or as_json)
    with connected(context) as api:
        answer = api.delete(path)
    print_answer(answer, f"{what} is deleted", as_json=as_json)


def _confirm(what: str, *, yes: bool) -> None:
    if not yes and sys.stdin.isatty() and not typer.confirm(f"Delete {what}?", err=True):
        raise CommandError("nothing is deleted")


def _delete_endpoint(api: Api, model: str, region: str) -> Any:
    return api.send("DELETE", "/admin/endpoints", params={"model": model, "region": region})


def _drain_node(api: Api, name: str) -> None:
    """Take a node out of service, and wait until it is empty and its agent is stopped."""
    api.post(path_to("/admin/nodes", name, "drain"))

    def left() -> str | None:
        node = api.get(path_to("/admin/nodes", name))
        holds = [row for row in node["instances"] if row["desired"] != "spot"]
        if holds:
            return f"node {name}: {instances_left(len(holds))}"
        return f"node {name} is empty; stop its agent on its machine now" if node["alive"] else None

    wait_until_none(left)
