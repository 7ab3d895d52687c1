"""LT-D, which is ours: the plan is what an endpoint may have, and what arrives says how much of it serves.

A plan holds for an hour and so for the hour's peak at its upper quantile. Where a start takes a minute most of that can
be left to others until it is asked for.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from controlplane.policies.scaling.facts import EndpointScaleFacts, Moment, ScaleStep
from controlplane.policies.scaling.plan_led import scale_to_plan


def scale_within_plan(facts: EndpointScaleFacts, moment: Moment) -> tuple[ScaleStep, ...]:
    """LT-D: go at once to as many of the plan's instances as carry what arrives with some room, by their profiles, and
    keep utilization below its upper threshold; let go what is beyond that with more room, while nothing starts.

    Without a plan, a profile, or a word of what arrives: as LT-I.
    """
    arrives, settings = facts.observed_tokens_per_s, moment.settings
    if facts.planned is None or arrives is None or facts.capacity(facts.planned) is None:
        return scale_to_plan(facts, moment)
    order, working = _in_order(facts), facts.working
    used = working * (facts.pressure or 0.0)
    calm = math.ceil(used / settings.out_above)
    fewest = max(calm, _enough(facts, order, arrives * settings.room_out))
    most = max(calm, _enough(facts, order, arrives * settings.room_in))
    count = max(working, fewest) if facts.ready < working else min(max(working, fewest), most)
    steps = scale_to_plan(replace(facts, planned=Counter(order[:count])), moment)
    words = f"{arrives:.0f} tokens/s and {used:.1f} instances' memory in use: {count} of the plan's {len(order)}"
    return tuple(replace(step, reason=words) for step in steps)


def _in_order(facts: EndpointScaleFacts) -> Sequence[str]:
    """GPU types of the plan's instances: first those that are there."""
    planned = Counter(facts.planned)
    there = planned & Counter(facts.present)
    return [*sorted(there.elements()), *sorted((planned - there).elements())]


def _enough(facts: EndpointScaleFacts, order: Sequence[str], tokens_per_s: float) -> int:
    """How many of them, from the first on, carry so much; all where they do not."""
    carried = 0.0
    for count, gpu_type in enumerate(order):
        if carried >= tokens_per_s:
            return count
        carried += facts.tokens_per_s[gpu_type]
    return len(order)
