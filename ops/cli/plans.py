"""`plan`: what to place where for the coming hour."""

from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.ids import PlanId, whole_id
from ops.cli.plan_plot import plot_plan
from ops.cli.plan_solve import print_schema, solve
from ops.client.api import connected, path_to
from ops.client.console import console_link, open_page
from ops.client.plan import show_plan
from ops.client.screen import (
    AsJson,
    Columns,
    print_answer,
    print_json,
    print_list,
    time_text,
)

plans = typer.Typer(no_args_is_help=True, help="Plans: how many instances of what, where, for an hour.")
Origin = Annotated[int | None, typer.Option("--origin-s", min=0, help="Use the forecasts of this Unix time.")]
Why = Annotated[str, typer.Option("--note", help="The reason, stored with the plan.")]
PLAN_TIMEOUT_S = 300.0


@plans.command("dry-run")
@examples("tidepool plan dry-run")
def dry_run(context: typer.Context, origin_s: Origin = None, as_json: AsJson = False) -> None:
    """Solve the placement and show what it would change; write nothing."""
    _show(_solve(context, dry_run=True, origin_s=origin_s), as_json=as_json)


@plans.command("create")
@examples("tidepool plan create")
def create(context: typer.Context, origin_s: Origin = None, as_json: AsJson = False) -> None:
    """Solve the placement and store the plan as a draft."""
    _show(_solve(context, dry_run=False, origin_s=origin_s), as_json=as_json)


@plans.command("list")
@examples("tidepool plan list --limit 5")
def list_plans(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List plans, the newest first."""
    with connected(context) as api:
        answer = api.get("/admin/plans", limit=limit)
    columns: Columns = {
        "plan": "id",
        "state": "state",
        "by": "created_by",
        "hour": lambda row: time_text(row["window_start_s"]),
        "objective per hour": "objective_per_hour",
        "solver": "status",
    }
    print_list("Plans", columns, answer, as_json=as_json)


@plans.command("show")
@examples(
    "tidepool plan show latest --changes-only",
    "tidepool plan show --explain plan_0190f3c2a7b57c1e8d2f4b6a8c0e1f23",
    "tidepool plan show --web",
)
def show(
    context: typer.Context,
    plan_id: PlanId = "current",
    explain: Annotated[bool, typer.Option("--explain", help="Print an explanation in sentences.")] = False,
    changes_only: Annotated[bool, typer.Option("--changes-only", help="Leave unchanged counts out.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Print the link to it in the console, and open it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a plan: now, change, why. By default the one in force."""
    with connected(context) as api:
        plan_id = whole_id(api, "plan", plan_id)
        if web:
            open_page(console_link(api, "plans", plan_id))
            return
        answer = api.get(path_to("/admin/plans", plan_id, *(["explanation"] if explain else [])))
    if explain and not as_json:
        typer.echo(answer["text"])
        return
    if not as_json:
        show_plan(answer, changes_only=changes_only)
        return
    if changes_only and not explain:
        for part in ("entries", "pools"):
            answer[part] = [row for row in answer[part] if row["before"] != row["after"]]
    print_json(answer)


@plans.command("apply")
@examples("tidepool plan apply plan_0190f3c2a7b57c1e8d2f4b6a8c0e1f23 --index 42")
def apply(
    context: typer.Context,
    plan_id: PlanId,
    index: Annotated[
        int | None, typer.Option(min=0, help="The fleet's index the plan was reviewed at; default: the plan's own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put a plan in force. Refused if the fleet has changed since the plan was made."""
    with connected(context) as api:
        plan_id = whole_id(api, "plan", plan_id)
        known = api.get(path_to("/admin/plans", plan_id))["index"] if index is None else index
        answer = api.post(path_to("/admin/plans", plan_id, "apply"), {"index": known})
    _show(answer, as_json=as_json)


@plans.command("inputs")
@examples("tidepool plan inputs --problem plan_0190f3c2a7b57c1e8d2f4b6a8c0e1f23 > problem.json")
def inputs(
    context: typer.Context,
    plan_id: PlanId,
    problem: Annotated[bool, typer.Option("--problem", help="Only the problem, for `tidepool plan solve`.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the inputs of a plan as JSON: the problem, and the forecasts with their fallbacks."""
    with connected(context) as api:
        answer = api.get(path_to("/admin/plans", whole_id(api, "plan", plan_id), "inputs"))
    print_json(answer["problem"] if problem else answer)


@plans.command("approve")
@examples("tidepool plan approve plan_0190f3c2a7b57c1e8d2f4b6a8c0e1f23")
def approve(context: typer.Context, plan_id: PlanId, as_json: AsJson = False) -> None:
    """Approve a plan that waits for an operator, and put it in force. Refused if the fleet has changed since."""
    with connected(context) as api:
        plan_id = whole_id(api, "plan", plan_id)
        answer = api.post(path_to("/admin/plans", plan_id, "approve"))
    print_answer(answer, f"plan {plan_id} is in force", as_json=as_json)


@plans.command("reject")
@examples('tidepool plan reject plan_0190f3c2a7b57c1e8d2f4b6a8c0e1f23 --note "the demand is a load test"')
def reject(context: typer.Context, plan_id: PlanId, note: Why = "", as_json: AsJson = False) -> None:
    """Reject a draft. The plan in force stays, and the schedule plans that hour no more."""
    with connected(context) as api:
        plan_id = whole_id(api, "plan", plan_id)
        answer = api.post(path_to("/admin/plans", plan_id, "reject"), {"note": note})
    print_answer(answer, f"plan {plan_id} is rejected", as_json=as_json)


@plans.command("rollback")
@examples('tidepool plan rollback plan_0190f3c2a7b57c1e8d2f4b6a8c0e1f23 --note "too few in us-east"')
def roll_back(context: typer.Context, plan_id: PlanId, note: Why = "", as_json: AsJson = False) -> None:
    """Roll the plan in force back: the placement before it is restored as a new plan.

    \b
    The schedule does not replan that hour. Rolling the new plan back restores the plan that was rolled back.
    """
    with connected(context) as api:
        plan_id = whole_id(api, "plan", plan_id)
        answer = api.post(path_to("/admin/plans", plan_id, "rollback"), {"note": note})
    restored = answer["plan"]
    print_answer(answer, f"plan {restored['id']} is in force: {restored['reason']}", as_json=as_json)


def _solve(context: typer.Context, *, dry_run: bool, origin_s: int | None) -> Any:
    body = {"dry_run": dry_run} | ({} if origin_s is None else {"origin_s": origin_s})
    with connected(context) as api:
        return api.send("POST", "/admin/plans", json=body, timeout=PLAN_TIMEOUT_S)


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        show_plan(answer)


plans.command("plot")(plot_plan)
plans.command("solve")(solve)
plans.command("schema")(print_schema)
