"""LT-D, which is ours: the plan is the most that an endpoint may have, and the observed demand decides how much of it
serves.

A plan covers the peak of its hour at an upper quantile. Where a start takes a minute, most of these instances can be
lent to others until the demand needs them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from controlplane.policies.scaling.facts import EndpointScaleFacts, Moment, ScaleStep
from controlplane.policies.scaling.plan_led import scale_to_plan


def scale_within_plan(facts: EndpointScaleFacts, moment: Moment) -> tuple[ScaleStep, ...]:
    """LT-D: scale out at once to as many of the plan's instances as serve the observed demand with some headroom, by
    their profiles, and keep utilization below its upper threshold; scale in what exceeds a larger headroom, while
    nothing starts.

    Without a plan, a profile, or observed demand it behaves as LT-I.
    """
    observed, settings = facts.observed_tokens_per_s, moment.settings
    if facts.planned is None or observed is None or facts.capacity(facts.planned) is None:
        return scale_to_plan(facts, moment)
    order, working = _in_order(facts), facts.working
    used = working * (facts.pressure or 0.0)
    below_threshold = math.ceil(used / settings.out_above)
    fewest = max(below_threshold, _enough(facts, order, observed * settings.room_out))
    most = max(below_threshold, _enough(facts, order, observed * settings.room_in))
    count = max(working, fewest) if facts.ready < working else min(max(working, fewest), most)
    steps = scale_to_plan(replace(facts, planned=Counter(order[:count])), moment)
    words = f"{observed:.0f} tokens/s and {used:.1f} instances' memory in use: {count} of the plan's {len(order)}"
    return tuple(replace(step, reason=words) for step in steps)


def _in_order(facts: EndpointScaleFacts) -> Sequence[str]:
    """GPU types of the plan's instances: present instances first."""
    planned = Counter(facts.planned)
    present = planned & Counter(facts.present)
    return [*sorted(present.elements()), *sorted((planned - present).elements())]


def _enough(facts: EndpointScaleFacts, order: Sequence[str], tokens_per_s: float) -> int:
    """How many instances, from the first on, serve so much; all where all are too few."""
    served = 0.0
    for count, gpu_type in enumerate(order):
        if served >= tokens_per_s:
            return count
        served += facts.tokens_per_s[gpu_type]
    return len(order)
