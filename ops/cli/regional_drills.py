"""Which drill over regions `tidepool faults run` was asked for."""

from collections.abc import Callable, Coroutine
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


def chosen_drill(
    fleet: Fleet,
    clients: ClientPlan,
    minutes: float,
    skew_s: float | None,
    *,
    region_loss: str | None,
    patroni: Path | None,
) -> Drill:
    """The drill of these options; without a loss that of regions out of step.

    Raises:
        CommandError: no such loss is known, or Patroni cannot decide it, or the fleet is not in three regions.
    """
    if region_loss is not None and region_loss not in tuple(Loss):
        raise CommandError(f"--region-loss: {region_loss!r} is none of {', '.join(Loss)}")
    if patroni is not None and region_loss != Loss.REGION:
        raise CommandError("--patroni: needs --region-loss region; Patroni's own connections are not cut or hung here")
    if fleet.regions != 3 or fleet.nodes < 3:
        option = "--out-of-step" if region_loss is None else "--region-loss"
        raise CommandError(f"{option}: needs --regions 3, and a node in each")
    third_s = minutes * 60 / 3
    if region_loss is None:
        skewed_s = _SKEW_S if skew_s is None else skew_s
        times = {"steady_s": third_s, "lagging_s": third_s, "hanging_s": third_s, "after_s": third_s / 2}
        steps = OutOfStepPlan(fleet=fleet, clients=clients, skew_s=skewed_s, **times)
        return lambda folder, notify: run_out_of_step(steps, folder, notify)
    loss = RegionalPlan(
        fleet=fleet,
        clients=clients,
        loss=Loss(region_loss),
        before_s=third_s,
        lost_s=third_s,
        after_s=third_s,
        skew_s=skew_s or 0.0,
        patroni=None if patroni is None else patroni.absolute(),
    )
    return lambda folder, notify: run_drill(loss, folder, notify)
