"""What of a simulation's result is kept: some kilobytes, however large the fleet."""

from collections.abc import Mapping
from typing import Any

_TOTALS = ("gpu_hours", "cost", "gpu_types", "starts", "scale_outs", "scale_ins", "switches", "node_failures",
           "interrupted", "unplaced")  # fmt: skip
_WHOLE = ("strategy", "requests", "failures", "simulated_s", "seconds", "slots", "slot_hours", "service_attainment",
          "token_attainment", "tiers")  # fmt: skip
_SERIES = ("start_s", "step_s", "gpus", "tiers")
_MODELS_MAX = 100


def figures_of(document: Mapping[str, Any], *, demand_from_s: int) -> dict[str, Any]:
    """The figures of a document that `tidepool simulate --json` wrote: totals, tiers, the models with the most
    requests, and series of the whole fleet. `demand_from_s`: the Unix time of the demand with which they begin.
    """
    models = sorted(document["rows"], key=lambda row: -row["requests"])[:_MODELS_MAX]
    return {
        **{name: document[name] for name in _WHOLE},
        "demand_from_s": demand_from_s,
        "models": models,
        "totals": {name: document["totals"][name] for name in _TOTALS},
        "series": {name: document["series"][name] for name in _SERIES},
    }
