"""`spot`: instances lent out while idle."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.ids import whole_id
from ops.cli.listing import print_pages
from ops.client.api import connected
from ops.client.screen import AsJson, Columns, print_answer

InstanceId = Annotated[str, typer.Argument(metavar="INSTANCE", help="Its id, or the first characters of it.")]
spot = typer.Typer(no_args_is_help=True, help="Spot: instances lent out while idle, and their leases.")


@spot.command("list")
@examples("tidepool spot list")
def list_spot(context: typer.Context, as_json: AsJson = False) -> None:
    """List spot instances and who leases them."""
    columns: Columns = {
        "instance": "instance_id",
        "model": "model",
        "region": "region",
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
    holder: Annotated[str, typer.Option(help="Who uses it.")],
    duration_s: Annotated[float, typer.Option(min=1, help="For how many seconds.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Lease a spot instance. The lease may be revoked, with notice, when the fleet needs the GPUs."""
    with connected(context) as api:
        instance_id = whole_id(api, "inst", instance_id)
        answer = api.post(f"/admin/spot/{instance_id}/lease", {"holder": holder, "duration_s": duration_s})
    print_answer(
        answer, f"{answer['id']}: {instance_id} is leased to {holder} until {answer['expires_at']}", as_json=as_json
    )


@spot.command("return")
@examples("tidepool spot return inst_0190f3c2a7b57c1e8d2f4b6a8c0e1f23")
def return_spot(context: typer.Context, instance_id: InstanceId, as_json: AsJson = False) -> None:
    """Give a leased instance back."""
    with connected(context) as api:
        instance_id = whole_id(api, "inst", instance_id)
        answer = api.delete(f"/admin/spot/{instance_id}/lease")
    print_answer(answer, f"{instance_id} is returned", as_json=as_json)


def _of_lease(row: Mapping[str, Any], field: str) -> Any:
    return None if row["lease"] is None else row["lease"][field]


def _until(row: Mapping[str, Any]) -> Any:
    """When the lease ends; with notice that is sooner than it was agreed."""
    return _of_lease(row, "reclaim_at") or _of_lease(row, "expires_at")
