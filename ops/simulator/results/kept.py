"""The figures of a what-if run, of which the control plane keeps some kilobytes, as a result again."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ops.simulator.results.results import Result, ResultError

_NOT_IN_RESULTS = ("models", "demand_from_s")


def result_of(run: Mapping[str, Any]) -> Result:
    """The result of a completed run, as the API answers it. What was not kept is empty or 0, which `compare` leaves
    out.

    Raises:
        ResultError: the run has no figures, or they are of another version.
    """
    kept = run["result"]
    if kept is None:
        raise ResultError(f"{run['id']} is {run['state']}: only completed runs have figures")
    nothing = {"events": 0, "requests_per_s": 0, "requests_in_system_mean": 0, "busy_share": 0, "seed": 0}
    try:
        return Result.model_validate(
            {
                **nothing,
                **{name: value for name, value in kept.items() if name not in _NOT_IN_RESULTS},
                "scenario": run["name"],
                "event_log_hash": run["event_log_hash"],
                "rows": kept["models"],
                "totals": {"instance_hours": {}, **kept["totals"]},
                "series": {"switches": [], "endpoints": [], "pools": [], "queues": [], **kept["series"]},
            }
        )
    except (ValidationError, KeyError) as error:
        raise ResultError(f"{run['id']}: its figures are of another version of the simulator") from error
