"""Endpoints that a reserve holds: beyond their plan while the reserve does not keep up.

Their plan is for the median peak, and the reserve takes what is beyond it. Where even the reserve would begin requests
late, instances start at once for all requests in flight, each for as many as it runs at once below the upper threshold
of utilization; and as many again as are lacking, since more requests come while they start. They go once nobody is late
and nothing was scaled for a while.
"""

import math
from collections import Counter
from dataclasses import replace

from controlplane.policies.scaling.facts import EndpointScaleFacts, Moment


def beyond_reserve(facts: EndpointScaleFacts, moment: Moment) -> EndpointScaleFacts:
    """The facts with the plan that holds now; those of an endpoint that no reserve holds are unchanged."""
    if facts.reserve is None or facts.planned is None or not facts.batch_max:
        return facts
    settings, working = moment.settings, facts.working
    needed = math.ceil(facts.in_flight / (settings.out_above * facts.batch_max))
    if facts.wait_s is not None and facts.wait_s > settings.late_s:
        count = max(working, 2 * needed - working)
    elif facts.last_scaled_s is not None and moment.now_s - facts.last_scaled_s < settings.hold_s:
        count = working
    else:
        count = min(working, needed)
    more = count - sum(facts.planned.values())
    if more <= 0:
        return facts
    return replace(facts, planned=Counter(facts.planned) + Counter({facts.reserve: more}))
