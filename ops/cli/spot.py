"""`spot`: idle instances that the fleet donates, and their leases."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.ids import whole_id
from ops.cli.listing import print_pages
from ops.client.api import connected, path_to
from ops.client.screen import AsJson, Columns, print_answer, same

InstanceId = Annotated[str, typer.Argument(metavar="INSTANCE", help="Its id, or the first characters of it.")]
spot = typer.Typer(no_args_is_help=True, help="Donated instances (spot): idle instances that others may lease.")


@spot.command("list")
@examples("tidepool spot list")
def list_spot(context: typer.Context, as_json: AsJson = False) -> None:
    """List donated instances and the holders of their leases."""
    columns: Columns = {
        "instance": "instance_id",
        **same("model", "region"),
        "GPU": "gpu_type",
        "node": "node",
        "spot since": "spot_at",
        "loaded": "ready",
        "leased by": lambda row: _of_lease(row, "holder"),
        "until": _until,
    }
    print_pages(context, "/admin/spot", "Spot instances", columns, as_json=as_json)


@spot.command("lease")
@examples("tidepool spot lease inst_0190f3c2a7b57c1e8d2f4b6a8c0e1f23 --holder research --duration-s 1800")
def lease_spot(
    context: typer.Context,
    instance_id: InstanceId,
    holder: Annotated[str, typer.Option(help="User of the instance.")],
    duration_s: Annotated[float, typer.Option(min=1, help="Duration of the lease in seconds.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Lease a donated instance. The fleet may revoke the lease, with notice, when it needs the GPUs."""
    with connected(context) as api:
        instance_id = whole_id(api, "inst", instance_id)
        answer = api.post(path_to("/admin/spot", instance_id, "lease"), {"holder": holder, "duration_s": duration_s})
    print_answer(
        answer, f"{answer['id']}: {instance_id} is leased to {holder} until {answer['expires_at']}", as_json=as_json
    )


@spot.command("return")
@examples("tidepool spot return inst_0190f3c2a7b57c1e8d2f4b6a8c0e1f23")
def return_spot(context: typer.Context, instance_id: InstanceId, as_json: AsJson = False) -> None:
    """Return a leased instance to the fleet."""
    with connected(context) as api:
        instance_id = whole_id(api, "inst", instance_id)
        answer = api.delete(path_to("/admin/spot", instance_id, "lease"))
    print_answer(answer, f"{instance_id} is returned", as_json=as_json)


def _of_lease(row: Mapping[str, Any], field: str) -> Any:
    return None if row["lease"] is None else row["lease"][field]


def _until(row: Mapping[str, Any]) -> Any:
    """When the lease ends, which is earlier than agreed once it is revoked."""
    return _of_lease(row, "reclaim_at") or _of_lease(row, "expires_at")
