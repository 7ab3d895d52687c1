"""`key`: who may use the API."""

from enum import StrEnum
from typing import Annotated

import typer

from ops.commands.api import connected
from ops.commands.screen import AsJson, Columns, print_json, print_table

keys = typer.Typer(no_args_is_help=True, help="API keys and their roles.")


class KeyRole(StrEnum):
    """What a key may do."""

    ADMIN = "admin"
    OPERATOR = "operator"
    VIEWER = "viewer"
    CLIENT = "client"
    NODE = "node"


@keys.command("create")
def create_key(
    context: typer.Context,
    name: str,
    role: Annotated[KeyRole, typer.Option(help="What the key may do.")] = KeyRole.CLIENT,
    tenant: Annotated[str, typer.Option(help="Whose files and batches the key sees.")] = "default",
    expires_in_days: Annotated[int | None, typer.Option(min=1, help="When it ends; default: never.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. Its secret is printed this once.

    \b
    Example:
      tidepool key create dashboard --role viewer --expires-in-days 90
    """
    body = {"name": name, "role": role.value, "tenant": tenant, "expires_in_days": expires_in_days}
    with connected(context) as api:
        answer = api.post("/admin/keys", body)
    if as_json:
        print_json(answer)
        return
    typer.echo(f"{answer['id']} ({role.value} of {tenant}); its secret is not shown again:", err=True)
    typer.echo(answer["secret"])


@keys.command("list")
def list_keys(context: typer.Context, as_json: AsJson = False) -> None:
    """List keys, without their secrets.

    \b
    Example:
      tidepool key list
    """
    with connected(context) as api:
        answer = api.pages("/admin/keys")
    if as_json:
        print_json(answer)
        return
    columns: Columns = {
        "key": "id",
        "name": "name",
        "role": "role",
        "tenant": "tenant",
        "begins": "prefix",
        "expires": "expires_at",
        "revoked": "revoked_at",
    }
    print_table("Keys", columns, answer["data"])


@keys.command("revoke")
def revoke_key(context: typer.Context, key_id: str, as_json: AsJson = False) -> None:
    """End a key's life.

    \b
    Example:
      tidepool key revoke key_0190f3c2a7b57c1e8d2f4b6a8c0e1f23
    """
    with connected(context) as api:
        answer = api.delete(f"/admin/keys/{key_id}")
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"key {key_id} is revoked")
