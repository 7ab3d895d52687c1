"""Rolling another model out under an alias: its share rises step by step, while it answers as well as those before.

A roll-out asks for instances before it sends requests to them, so a share never rises above what is ready for it. It
goes back by itself as soon as the candidate is worse than the models before by more than a margin and beyond chance.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.policies.facts import Endpoint

SETTLE_S = 3 * 3600.0
"""How long the instances of the model that a roll-out ended with are kept: until plans have seen all of its traffic."""
_DEVIATIONS = 2.0
"""How many standard deviations a difference must exceed its margin by: by chance one look in fifty would."""
_ANSWERS_JUDGED = 10
"""Fewer answers of the candidate are too few to judge it by."""


@dataclass(frozen=True, kw_only=True)
class AnswerCounts:
    """Answers of a model that have an objective: those that failed, and those that missed it, failed ones included."""

    answers: int = 0
    failed: int = 0
    missed: int = 0

    def since(self, before: "AnswerCounts") -> "AnswerCounts":
        """What was counted after an earlier reading of the same counters."""
        return AnswerCounts(
            answers=max(0, self.answers - before.answers),
            failed=max(0, self.failed - before.failed),
            missed=max(0, self.missed - before.missed),
        )


@dataclass(frozen=True, kw_only=True)
class RolloutFacts:
    """A roll-out and what became of it. `steps`: shares in percent; `step`: the index of the one in force, -1 before
    the first; `held_s`: since when. `hold_s`, `answers_min`: how long, and for how many answers of the candidate, each
    step lasts; `skips`: an operator ended the step. `worse_max`: by how much the candidate's share of failed or missed
    answers may exceed that of the models before. `instances`: the most that the models before had in each region.
    `ready`: the candidate's; `failing`: regions where it has failed instances only, with their error. `candidate`: its
    answers in this step, `baseline`: those of the models before since the beginning.
    """

    steps: tuple[int, ...]
    step: int
    held_s: float
    hold_s: float
    answers_min: int
    worse_max: float
    instances: Mapping[str, int]
    paused: bool = False
    skips: bool = False
    ready: Mapping[str, int] = field(default_factory=dict)
    failing: Mapping[str, str] = field(default_factory=dict)
    candidate: AnswerCounts = AnswerCounts()
    baseline: AnswerCounts = AnswerCounts()


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Stay at this step, and what is waited for."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Go on to the step of this index."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Finish:
    """All requests stay with the candidate."""


@dataclass(frozen=True, kw_only=True)
class GoBack:
    """All requests go to the models before again, and why."""

    reason: str


RolloutDecision = Hold | Shift | Finish | GoBack


def choose_rollout(facts: RolloutFacts) -> RolloutDecision:
    """What to do now. A paused roll-out still goes back where the candidate fails."""
    if trouble := _trouble(facts):
        return GoBack(reason=trouble)
    if facts.paused:
        return Hold(reason="paused")
    if facts.step >= 0 and not facts.skips:
        if (left_s := facts.hold_s - facts.held_s) > 0:
            return Hold(reason=f"{math.ceil(left_s)} s of this step are left")
        if facts.candidate.answers < facts.answers_min:
            return Hold(reason=f"waits for answers: {facts.candidate.answers} of {facts.answers_min} in this step")
    if facts.step == len(facts.steps) - 1:
        return Finish()
    needed = instances_for(facts.instances, facts.steps[facts.step + 1])
    lacking = [
        f"{region} {facts.ready.get(region, 0)} of {count}"
        for region, count in sorted(needed.items())
        if facts.ready.get(region, 0) < count
    ]
    if lacking:
        return Hold(reason=f"waits for ready instances: {', '.join(lacking)}")
    return Shift(step=facts.step + 1)


def instances_for(instances: Mapping[str, int], share: int) -> dict[str, int]:
    """The instances of the candidate by region that a share in percent asks for."""
    return {region: math.ceil(count * share / 100) for region, count in instances.items()}


def shifted_weights(before: Mapping[str, int], candidate: str, share: int) -> dict[str, int]:
    """The weights with this share in percent for the candidate; the others keep their proportions. Models without a
    share are left out.
    """
    others = {model: weight for model, weight in before.items() if model != candidate}
    whole = sum(others.values())
    if not whole or share == 100:
        return {candidate: 1}
    weights = {model: weight * (100 - share) for model, weight in others.items()} | {candidate: whole * share}
    divisor = math.gcd(*weights.values())
    return {model: weight // divisor for model, weight in weights.items() if weight}


@dataclass(frozen=True, kw_only=True)
class KeptCapacity:
    """What a roll-out asks scaling to keep. `instances`: by model before and region. `share`: what the
    candidate has, in percent; `next_share`: what it is about to get. `keep`: the models before keep their instances
    until the end, so that it can go back at once.
    """

    candidate: str
    instances: Mapping[str, Mapping[str, int]]
    share: int
    next_share: int
    keep: bool


def least_instances(rollouts: Iterable[KeptCapacity]) -> dict[Endpoint, int]:
    """The least instances of each endpoint that takes part in a roll-out, or did until `SETTLE_S` ago."""
    least: dict[Endpoint, int] = {}
    for rollout in rollouts:
        wanted = dict(_wanted_before(rollout))
        for region, count in instances_for(total_by_region(rollout.instances), rollout.next_share).items():
            wanted[Endpoint(model=rollout.candidate, region=region)] = count
        for endpoint, count in wanted.items():
            least[endpoint] = max(count, least.get(endpoint, 0))
    return {endpoint: count for endpoint, count in least.items() if count}


def total_by_region(instances: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Instances of several models, added up by region."""
    regions = sorted({region for of_model in instances.values() for region in of_model})
    return {region: sum(of_model.get(region, 0) for of_model in instances.values()) for region in regions}


def _wanted_before(rollout: KeptCapacity) -> Iterable[tuple[Endpoint, int]]:
    for model, regions in rollout.instances.items():
        kept = regions if rollout.keep else instances_for(regions, 100 - rollout.share)
        yield from ((Endpoint(model=model, region=region), count) for region, count in kept.items())


def _trouble(facts: RolloutFacts) -> str | None:
    """Why the candidate must not stay; None: it may."""
    if facts.failing:
        region, error = min(facts.failing.items())
        return f"no instance of the candidate starts in {region}: {error}"
    compared = (
        ("failed", facts.candidate.failed, facts.baseline.failed),
        ("missed their objective", facts.candidate.missed, facts.baseline.missed),
    )
    for what, ours, theirs in compared:
        if _is_worse(ours, facts.candidate.answers, theirs, facts.baseline.answers, facts.worse_max):
            return (
                f"{_percent(ours, facts.candidate.answers)} of {facts.candidate.answers} answers {what}, of"
                f" {facts.baseline.answers} of the models before {_percent(theirs, facts.baseline.answers)}"
            )
    return None


def _is_worse(ours: int, answers: int, theirs: int, their_answers: int, margin: float) -> bool:
    """Whether one share exceeds the other by more than the margin, beyond chance: the interval of Agresti and Caffo
    (The American Statistician 54, 2000) for a difference of shares, which adds a success and a failure to each. Where
    the models before have no answers, they count as faultless.
    """
    if answers < _ANSWERS_JUDGED:
        return False
    p, variance = _share(ours, answers)
    q, their_variance = _share(theirs, their_answers) if their_answers else (0.0, 0.0)
    return p - q - _DEVIATIONS * math.sqrt(variance + their_variance) > margin


def _share(part: int, whole: int) -> tuple[float, float]:
    """A share of more answers than were seen, by one of each kind, and its variance."""
    share = (part + 1) / (whole + 2)
    return share, share * (1 - share) / (whole + 2)


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"
