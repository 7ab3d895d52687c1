"""`term`: the number that rises with each promotion, by which nodes know which primary to obey."""

import typer

from ops.cli.examples import examples
from ops.client.api import connected
from ops.client.screen import AsJson, print_answer, print_fields, print_json

terms = typer.Typer(no_args_is_help=True, help="The term of the primary: nodes obey nobody of an older one.")


@terms.command("show")
@examples("tidepool term show")
def show_term(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the term of the primary, and the newest that nodes reported where it is newer."""
    with connected(context) as api:
        term = api.get("/admin/term")
    if as_json:
        print_json(term)
        return
    print_fields(
        [
            ("term", term["term"]),
            ("reported by nodes", term["reported"] or None),
            ("timeline", term["timeline"]),
            ("PostgreSQL cluster", term["system_identifier"]),
        ]
    )


@terms.command("raise")
@examples("tidepool term raise")
def raise_term(context: typer.Context, as_json: AsJson = False) -> None:
    """Let nodes obey this primary although they have seen a newer term: after an older backup was restored on purpose.
    Never where another primary runs.
    """
    with connected(context) as api:
        term = api.post("/admin/term/raise")
    print_answer(term, f"term {term['term']} begins: nodes follow it with their next heartbeat", as_json=as_json)
