"""A plan for people, as the API answers it."""

from typing import Any

from controlplane.policies.plan_explanations import pool_name
from ops.client.screen import Columns, output, print_fields, print_table, same, time_text


def show_plan(answer: dict[str, Any], *, changes_only: bool = False) -> None:
    """A plan for people: how it was solved, every cell with its reason, and what it cannot serve. `changes_only`:
    without cells and pools that stay as they are.
    """
    plan = answer["plan"]
    entries, pools = (
        [row for row in answer[part] if not changes_only or row["before"] != row["after"]]
        for part in ("entries", "pools")
    )
    gap = "unknown" if plan["gap"] is None else f"{plan['gap']:.2%}"
    print_fields(
        [
            ("plan", plan["id"]),
            ("state", plan["state"]),
            ("hour", time_text(plan["window_start_s"])),
            ("solver", f"{plan['solver']}, {plan['status']}, gap {gap}, {plan['solve_time_s']:.2f} s"),
            ("objective per hour", plan["objective_per_hour"]),
            ("why", plan["reason"]),
            *([("needs approval", plan["approval_reason"])] if plan["approval_reason"] else []),
            ("index", answer["index"]),
        ]
    )
    columns: Columns = {
        **same("model", "region"),
        "GPU": "gpu_type",
        "now": "before",
        "plan": "after",
        "change": lambda row: f"{row['after'] - row['before']:+d}" if row["after"] != row["before"] else "",
        "held by": "constraint",
        "cost if not": lambda row: f"{row['cost_if_not']:,.2f}" if row["cost_if_not"] else "",
        "why": "reason",
    }
    print_table("Changes" if changes_only else "Instances", columns, entries)
    for pool in pools:
        _show_pool(pool, answer["pools"])
    for one in answer.get("layouts", ()):  # a gateway of the release before has none
        slots = " -> ".join(",".join(map(str, one[when])) for when in ("before", "after"))
        output().print(f"slots of node {one['node']}: {slots}; {one['reason']}", markup=False)
    for unserved in answer["unserved"]:
        output().print("not served:", _unserved_text(unserved), markup=False)


def _show_pool(pool: dict[str, Any], pools: list[dict[str, Any]]) -> None:
    """`pools`: all of the plan."""
    names = ", ".join(each["model"] for each in pool["pooled"])
    of = f" for {names}" if names else ""
    output().print(f"pool of {pool_name(pool, pools)}: {pool['before']} -> {pool['after']} GPUs{of}", markup=False)
    if (reserve := pool.get("reserve")) is None:
        return
    missing = f", {reserve['missing_gpus']} missing" if reserve["missing_gpus"] else ""
    output().print(f"reserve in it: {reserve['gpus']} GPUs{missing}; {reserve['reason']}", markup=False)
    for each in reserve["held"]:
        output().print(f"  holds {each['model']}: {each['reason']}", markup=False)
    for model, reason in reserve["left_out"].items():
        output().print(f"  does not hold {model}: {reason}", markup=False)


def _unserved_text(unserved: Any) -> str:
    if isinstance(unserved, dict):
        return ", ".join(f"{name} {value}" for name, value in unserved.items())
    return str(unserved)
