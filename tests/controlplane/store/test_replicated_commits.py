"""Which commits wait for other regions: all but those of what is measured, noted or renewed again soon."""

import ast
from collections.abc import Iterator
from pathlib import Path

import controlplane

LOCAL = {
    "api/nodes.py": {"touch_node", "note_reported", "observe", "desired_of"},
    "dispatcher/release.py": {"renew"},
    "planner/compare.py": {
        "measure_latency",
        "measured_since_s",
        "profiles_in_force",
        "put_comparisons",
        "read_loads",
        "stated_latencies",
    },
    "planner/expected.py": {"make"},
    "planner/predict.py": {"read_progress", "read_speeds", "read_takers", "write_ends", "write_speeds"},
    "planner/runs.py": {"note_failure", "note_success"},
    "planner/schedule.py": {"forecast_one", "measure", "observe"},
    "serving/objectives.py": {"add_objectives"},
    "serving/usage.py": {"put_usage"},
}
"""What is called with a session whose commit waits for the primary alone. Whoever adds a function here says that
nobody was told of what it writes, and that it is written again, or not missed. The request log waits for no disk at all
(`write_requests`).
"""
PROMISES = {
    "api/nodes.py": {"join_node"},
    "api/token_budgets.py": {"reserve_block", "return_block"},
    "dispatcher/results.py": {"finish"},
    "dispatcher/steps.py": {"begin_attempt", "give_up", "hold_batch", "lock_batch", "note_failure", "take"},
    "planner/plan.py": {"add_plan", "apply_plan"},
    "planner/scale.py": {"_write_instances"},
    "serving/stored_responses.py": {"add_response", "end_response"},
}
"""Some of the others: results, the steps of batches, plans. Requests to the API, such as that which revokes a key, are
transactions of this kind too (`SessionDep`).
"""


def test_what_commits_on_the_primary_alone() -> None:
    assert {path: names for path, names in called(replicated=False) if names} == LOCAL


def test_promises_wait_for_other_regions() -> None:
    found = dict(called(replicated=True))
    for path, names in PROMISES.items():
        assert names <= found[path], path
        assert not names & LOCAL.get(path, set()), path
    assert "api/state.py" in found


def called(*, replicated: bool) -> Iterator[tuple[str, set[str]]]:
    """By file of the control plane, the functions called with the session of such transactions."""
    root = Path(controlplane.__file__).parent
    for path in sorted(root.rglob("*.py")):
        blocks = [node for node in ast.walk(ast.parse(path.read_text())) if _opens(node, replicated=replicated)]
        if blocks:
            yield path.relative_to(root).as_posix(), set().union(*map(_given_a_session, blocks))


def _opens(node: ast.AST, *, replicated: bool) -> bool:
    """Whether this is a with-statement of a transaction that waits for other regions, or does not."""
    if not isinstance(node, ast.With):
        return False
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    opened = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in {"transaction", "statement"}
    ]
    return any(_waits(call) == replicated for call in opened)


def _waits(call: ast.Call) -> bool:
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return bool(given.get("replicated", True))


def _given_a_session(block: ast.AST) -> set[str]:
    calls = [node for node in ast.walk(block) if isinstance(node, ast.Call)]
    with_session = [call for call in calls if any(isinstance(a, ast.Name) and a.id == "session" for a in call.args)]
    names = [call.func for call in with_session]
    return {name.attr if isinstance(name, ast.Attribute) else ast.unparse(name) for name in names}
