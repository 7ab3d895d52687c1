"""Which drill over regions `tidepool faults run` was asked for."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.client.api import CommandError
from ops.faults.regional.clients import ClientPlan
from ops.faults.regional.drill import Loss, RegionalPlan, run_drill
from ops.faults.regional.out_of_step import OutOfStepPlan, run_out_of_step
from ops.local.replay_stack import Fleet

Drill = Callable[[Path, Callable[[str], None]], Coroutine[Any, Any, dict[str, Any]]]
"""From its folder, and what it tells while it runs, to its report."""
_SKEW_S = 5.0


@dataclass(frozen=True, kw_only=True)
class DrillAsked:
    """The options that choose a drill."""

    region_loss: str | None
    out_of_step: bool
    patroni: Path | None
    skew_s: float | None


def chosen_drill(asked: DrillAsked, fleet: Fleet, clients: ClientPlan, minutes: float) -> Drill:
    """The drill of these options.

    Raises:
        CommandError: options that do not go together, or no such loss is known, or the fleet is not in three regions.
    """
    _check(asked, fleet)
    third_s = minutes * 60 / 3
    if asked.region_loss is None:
        skewed_s = _SKEW_S if asked.skew_s is None else asked.skew_s
        times = {"steady_s": third_s, "lagging_s": third_s, "hanging_s": third_s, "after_s": third_s / 2}
        steps = OutOfStepPlan(fleet=fleet, clients=clients, skew_s=skewed_s, **times)
        return lambda folder, notify: run_out_of_step(steps, folder, notify)
    loss = RegionalPlan(
        fleet=fleet,
        clients=clients,
        loss=Loss(asked.region_loss),
        before_s=third_s,
        lost_s=third_s,
        after_s=third_s,
        skew_s=asked.skew_s or 0.0,
        patroni=None if asked.patroni is None else asked.patroni.absolute(),
    )
    return lambda folder, notify: run_drill(loss, folder, notify)


def _check(asked: DrillAsked, fleet: Fleet) -> None:
    if asked.region_loss is None and not asked.out_of_step:
        raise CommandError("--skew-s and --patroni: need --region-loss, or the first --out-of-step")
    if asked.region_loss is not None and asked.out_of_step:
        raise CommandError("--out-of-step: it is a drill of its own; leave --region-loss out")
    if asked.region_loss is not None and asked.region_loss not in tuple(Loss):
        raise CommandError(f"--region-loss: {asked.region_loss!r} is none of {', '.join(Loss)}")
    if asked.patroni is not None and asked.region_loss != Loss.REGION:
        raise CommandError("--patroni: needs --region-loss region; Patroni's own connections are not cut or hung here")
    if asked.patroni is not None and asked.skew_s:
        raise CommandError("--patroni: leave --skew-s out; what shifts servers' clocks breaks Patroni's waits")
    if fleet.regions != 3 or fleet.nodes < 3:
        option = "--out-of-step" if asked.out_of_step else "--region-loss"
        raise CommandError(f"{option}: needs --regions 3, and a node in each")
