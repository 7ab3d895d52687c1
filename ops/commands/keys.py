"""`key`: who may use the API."""

from enum import StrEnum
from typing import Annotated

import typer

from ops.commands.api import connected
from ops.commands.ids import whole_id
from ops.commands.screen import AsJson, Columns, print_json, print_table

KeyId = Annotated[str, typer.Argument(metavar="KEY", help="Its id, or the first characters of it.")]
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
keys = typer.Typer(no_args_is_help=True, help="API keys and their roles.")


class KeyRole(StrEnum):
    """What a key may do."""

    ADMIN = "admin"
    OPERATOR = "operator"
    VIEWER = "viewer"
    CLIENT = "client"
    NODE = "node"


class KeyScope(StrEnum):
    """A part of `/v1`."""

    CHAT = "chat"
    FILES = "files"
    BATCH = "batch"
    MODELS = "models"


@keys.command("create")
def create_key(
    context: typer.Context,
    name: str,
    role: Annotated[KeyRole, typer.Option(help="What the key may do.")] = KeyRole.CLIENT,
    tenant: Annotated[str, typer.Option(help="Whose files and batches the key sees.")] = "default",
    expires_in_days: Annotated[int | None, typer.Option(min=1, help="When it ends; default: never.")] = None,
    scope: Annotated[
        list[KeyScope] | None, typer.Option(help="A part of /v1 that it is for; may be repeated. Default: all.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that it is for; may be repeated. Default: all.")
    ] = None,
    node: Annotated[str | None, typer.Option(help="The only node that a key of the role 'node' speaks for.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. Its secret is printed this once.

    \b
    Example:
      tidepool key create dashboard --role viewer --expires-in-days 90
      tidepool key create nightly --scope files --scope batch --model qwen3-8b
      tidepool key create node-7 --role node --node node-7
    """
    body = {
        "name": name,
        "role": role.value,
        "tenant": tenant,
        "expires_in_days": expires_in_days,
        "scopes": [one.value for one in scope] if scope else None,
        "models": model or None,
        "node": node,
    }
    with connected(context) as api:
        answer = api.post("/admin/keys", body)
    if as_json:
        print_json(answer)
        return
    typer.echo(f"{answer['id']} ({role.value} of {tenant}); its secret is not shown again:", err=True)
    typer.echo(answer["secret"])


@keys.command("rotate")
def rotate_key(
    context: typer.Context,
    key_id: KeyId,
    overlap: Annotated[str, typer.Option(help="For how long the present secret works still: 90s, 30m, 1h, 2d.")] = "1h",
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret. It is printed this once; the present one works until the overlap ends.

    \b
    Example:
      tidepool key rotate key_0190f3c2a7b57c1e8d2f4b6a8c0e1f23 --overlap 1h
    """
    with connected(context) as api:
        key_id = whole_id(api, "key", key_id)
        answer = api.post(f"/admin/keys/{key_id}/rotate", {"overlap_s": _seconds(overlap)})
    if as_json:
        print_json(answer)
        return
    typer.echo(f"{key_id}: the old secret works until {answer['old_until']}; the new one is not shown again:", err=True)
    typer.echo(answer["secret"])


def _seconds(duration: str) -> int:
    """A duration such as 90s, 30m, 1h or 2d.

    Raises:
        typer.BadParameter: it is none.
    """
    number, unit = duration[:-1], duration[-1:]
    if not (number.isascii() and number.isdigit()) or unit not in _UNIT_S:
        raise typer.BadParameter(f"'{duration}' is no duration such as 90s, 30m, 1h or 2d")
    return int(number) * _UNIT_S[unit]


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
        "scopes": "scopes",
        "models": "models",
        "node": "node",
        "begins": "prefix",
        "expires": "expires_at",
        "revoked": "revoked_at",
    }
    print_table("Keys", columns, answer["data"])


@keys.command("revoke")
def revoke_key(context: typer.Context, key_id: KeyId, as_json: AsJson = False) -> None:
    """End a key's life.

    \b
    Example:
      tidepool key revoke key_0190f3c2a7b57c1e8d2f4b6a8c0e1f23
    """
    with connected(context) as api:
        key_id = whole_id(api, "key", key_id)
        answer = api.delete(f"/admin/keys/{key_id}")
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"key {key_id} is revoked")
