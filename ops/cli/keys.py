"""`key`: who may use the API."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from ops.cli.examples import examples
from ops.cli.ids import whole_id
from ops.cli.listing import print_pages
from ops.client.api import Api, CommandError, connected, path_to
from ops.client.home import EmbeddedError, home_of, is_of_up, keys_file, read_secrets, write_secrets
from ops.client.screen import AsJson, Columns, print_answer, print_json, same
from ops.client.times import duration_s

KeyId = Annotated[str, typer.Argument(metavar="KEY", help="Its id, or the first characters of it.")]
keys = typer.Typer(no_args_is_help=True, help="API keys and their roles.")


KeyRole = Literal["admin", "operator", "viewer", "client", "node"]
FirstRole = Literal["admin", "client", "node"]
"""The roles of the keys that an installation starts with."""
KeyScope = StrEnum("KeyScope", ["chat", "files", "batch", "models"])
"""A part of `/v1`."""


@keys.command("create")
@examples(
    "tidepool key create dashboard --role viewer --expires-in-days 90",
    "tidepool key create nightly --scope files --scope batch --model qwen3-8b",
    "tidepool key create node-7 --role node --node node-7",
)
def create_key(
    context: typer.Context,
    name: str,
    role: Annotated[KeyRole, typer.Option(help="What the key may do.")] = "client",
    tenant: Annotated[str, typer.Option(help="The tenant whose files and batches the key may read.")] = "default",
    expires_in_days: Annotated[int | None, typer.Option(min=1, help="When it ends; default: never.")] = None,
    scope: Annotated[
        list[KeyScope] | None, typer.Option(help="A part of /v1 that it may use; may be repeated. Default: all.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that it may use; may be repeated. Default: all.")
    ] = None,
    node: Annotated[str | None, typer.Option(help="The only node for which a key of the role 'node' is valid.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. Its secret is printed only once."""
    body = {
        "name": name,
        "role": role,
        "tenant": tenant,
        "expires_in_days": expires_in_days,
        "scopes": [each.value for each in scope] if scope else None,
        "models": model or None,
        "node": node,
    }
    with connected(context) as api:
        answer = api.post("/admin/keys", body)
    if as_json:
        print_json(answer)
        return
    typer.echo(f"{answer['id']} ({role} of {tenant}); its secret is not shown again:", err=True)
    typer.echo(answer["secret"])


@keys.command("rotate")
@examples("tidepool key rotate key_0190f3c2a7b57c1e8d2f4b6a8c0e1f23 --overlap 1h")
def rotate_key(
    context: typer.Context,
    key_id: KeyId,
    overlap: Annotated[str, typer.Option(help="How long the old secret remains valid: 90s, 30m, 1h, 2d.")] = "1h",
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret, which is printed only once. The old one works until the overlap ends.

    \b
    A key of keys.json is replaced there too, for the command line and `tidepool up`.
    """
    seconds = duration_s(overlap)
    home = home_of(os.environ)
    with connected(context) as api:
        key_id = whole_id(api, "key", key_id)
        role = _kept_role(home, api, key_id)
        answer = api.post(path_to("/admin/keys", key_id, "rotate"), {"overlap_s": seconds})
    if as_json:
        print_json(answer)
    else:
        until = answer["old_until"]
        typer.echo(f"{key_id}: the old secret works until {until}; the new one is not shown again:", err=True)
        typer.echo(answer["secret"])
    if role is not None:
        _keep(home, role, answer["secret"])


def _keep(home: Path, role: str, secret: str) -> None:
    """Write a new secret to keys.json, and report it."""
    try:
        write_secrets(home, read_secrets(home) | {role: secret})
    except (OSError, EmbeddedError) as error:
        raise CommandError(f"put the new secret of '{role}' into {keys_file(home)} yourself: {error}") from error
    restart = "; restart `tidepool up` before the old secret ends" if role == "node" else ""
    typer.echo(f"{keys_file(home)} has the new secret of '{role}'{restart}", err=True)


def _kept_role(home: Path, api: Api, key_id: str) -> str | None:
    """The role under which keys.json has this key; None: it has not. The API returns the first characters of a secret,
    which tell the few keys of `tidepool init` and `tidepool up` apart.
    """
    try:
        kept = read_secrets(home)
    except EmbeddedError:
        return None
    rows = api.pages("/admin/keys")["data"] if kept else []
    prefix = next((row["prefix"] for row in rows if row["id"] == key_id and row["name"].startswith("bootstrap-")), None)
    return next((role for role, secret in kept.items() if prefix is not None and secret.startswith(prefix)), None)


@keys.command("secret")
@examples("export TIDEPOOL_KEY=$(tidepool key secret client)")
def print_secret(role: FirstRole, as_json: AsJson = False) -> None:
    """Print a secret of keys.json, which `tidepool init` and `tidepool up` write. Sends no request to the API."""
    home = home_of(os.environ)
    try:
        secret = read_secrets(home).get(role)
    except EmbeddedError as error:
        raise CommandError(str(error)) from error
    if secret is None:
        maker = "restart `tidepool up`" if is_of_up(home) else "run `tidepool init`"
        raise CommandError(f"{keys_file(home)} has no key '{role}': {maker}")
    print_answer({role: secret}, secret, as_json=as_json)


@keys.command("list")
@examples("tidepool key list")
def list_keys(context: typer.Context, as_json: AsJson = False) -> None:
    """List keys, without their secrets."""
    columns: Columns = {
        "key": "id",
        **same("name", "role", "tenant", "scopes", "models", "node"),
        "begins": "prefix",
        "expires": "expires_at",
        "revoked": "revoked_at",
    }
    print_pages(context, "/admin/keys", "Keys", columns, as_json=as_json)


@keys.command("revoke")
@examples("tidepool key revoke key_0190f3c2a7b57c1e8d2f4b6a8c0e1f23")
def revoke_key(context: typer.Context, key_id: KeyId, as_json: AsJson = False) -> None:
    """Revoke a key."""
    with connected(context) as api:
        key_id = whole_id(api, "key", key_id)
        answer = api.delete(path_to("/admin/keys", key_id))
    print_answer(answer, f"key {key_id} is revoked", as_json=as_json)
