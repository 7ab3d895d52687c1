"""Whether an hourly plan is applied automatically or waits for an operator, by the GPUs it moves and its cost."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from controlplane.policies.facts import RegionGpu


class ApprovalRule(StrEnum):
    """Plans are applied without asking, or unless a limit is exceeded, or never."""

    AUTOMATIC = "automatic"
    LIMITS = "limits"
    ALWAYS = "always"


@dataclass(frozen=True, kw_only=True)
class GpuChange:
    """GPUs of one kind that an endpoint, or a pool, holds in a region before and after a plan."""

    place: RegionGpu
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class ApprovalFacts:
    """A plan's changes, the GPUs of the whole fleet, and the cost per hour of what is placed before and after."""

    changes: tuple[GpuChange, ...]
    fleet_gpus: int
    cost_before_per_hour: float
    cost_after_per_hour: float


@dataclass(frozen=True, kw_only=True)
class ApprovalSettings:
    """When to ask. None: no limit of that kind.

    Attributes:
        gpus_moved_max: GPUs that may hold something else after the plan.
        share_moved_max: the same as a share of the fleet's GPUs.
        cost_change_max: how far the cost per hour may rise or fall, in the currency of the GPU prices.
    """

    rule: ApprovalRule = ApprovalRule.AUTOMATIC
    gpus_moved_max: int | None = None
    share_moved_max: float | None = 0.25
    cost_change_max: float | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: a negative limit, or the rule "limits" without any.
        """
        limits = (self.gpus_moved_max, self.share_moved_max, self.cost_change_max)
        if any(limit is not None and limit < 0 for limit in limits):
            raise ValueError(f"limits of an approval must not be negative, got {limits}")
        if self.rule == ApprovalRule.LIMITS and all(limit is None for limit in limits):
            raise ValueError(
                "rule 'limits' needs at least one of gpus_moved_max, share_moved_max, cost_change_max;"
                " without limits the rule is 'automatic'"
            )


@dataclass(frozen=True, kw_only=True)
class Approval:
    """The decision. `reasons`: why a plan needs approval; empty for an automatic one."""

    automatic: bool
    reasons: tuple[str, ...]


def choose_approval(facts: ApprovalFacts, now_s: float, settings: ApprovalSettings) -> Approval:
    """Decide whether a plan may go into force by itself.

    Args:
        facts: what the plan changes; the order does not matter.
        now_s: Unix time; not looked at.
        settings: see ApprovalSettings.
    """
    if settings.rule == ApprovalRule.AUTOMATIC:
        return Approval(automatic=True, reasons=())
    if settings.rule == ApprovalRule.ALWAYS:
        return Approval(automatic=False, reasons=("every plan of this fleet is approved by an operator",))
    reasons = tuple(_exceeded(facts, settings))
    return Approval(automatic=not reasons, reasons=reasons)


def gpus_moved(changes: Iterable[GpuChange]) -> int:
    """GPUs that hold something else afterwards: in each region and of each type, those given up or those taken,
    whichever are more, since what one endpoint gives up another may take.
    """
    taken: dict[RegionGpu, int] = {}
    given: dict[RegionGpu, int] = {}
    for change in changes:
        taken[change.place] = taken.get(change.place, 0) + max(0, change.after - change.before)
        given[change.place] = given.get(change.place, 0) + max(0, change.before - change.after)
    return sum(max(taken[place], given[place]) for place in taken)


def _exceeded(facts: ApprovalFacts, settings: ApprovalSettings) -> Iterable[str]:
    moved = gpus_moved(facts.changes)
    share = moved / facts.fleet_gpus if facts.fleet_gpus else 0.0
    change = facts.cost_after_per_hour - facts.cost_before_per_hour
    if settings.gpus_moved_max is not None and moved > settings.gpus_moved_max:
        yield f"moves {moved} GPUs, the limit is {settings.gpus_moved_max}"
    if settings.share_moved_max is not None and share > settings.share_moved_max:
        limit = f"{settings.share_moved_max:.1%}"
        yield f"moves {share:.1%} of the fleet ({moved} of {facts.fleet_gpus} GPUs), the limit is {limit}"
    if settings.cost_change_max is not None and abs(change) > settings.cost_change_max:
        word = "raises" if change > 0 else "lowers"
        yield f"{word} the cost per hour by {abs(change):,.2f}, the limit is {settings.cost_change_max:,.2f}"
