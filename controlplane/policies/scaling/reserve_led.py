"""Endpoints that a reserve holds: beyond their plan while the reserve does not keep up.

Their plan is for the median peak, and the reserve takes what is beyond it. Where even the reserve would begin requests
late, and as many wait as are an eighth of an instance's, instances start at once for all requests in flight, each for
as many as it runs at once below the upper threshold of utilization; and as many again as are lacking, since more
requests come while they start. So many only as are lent out and come back in a minute: others take ten, and displace
another model's, so they start for what has arrived in the last minutes. Where none comes back, and as many wait as are
a whole instance's, one starts in each run: input tokens say nothing of answers that are longer than usual. They go once
nobody is late, none starts and nothing was scaled for a while, as far as those that are left serve what arrives:
deferred requests fill instances that are there, and would keep them. But those that are left have room for all requests
in flight, since tokens say nothing of long answers here, either.
"""

import math
from collections import Counter
from dataclasses import replace

from controlplane.policies.scaling.facts import EndpointScaleFacts, Moment

_WAITING_SHARE = 1 / 8
"""Of an instance's requests. Fewer wait for one long prompt."""


def beyond_reserve(facts: EndpointScaleFacts, moment: Moment) -> EndpointScaleFacts:
    """The facts with the plan that holds now; those of an endpoint that no reserve holds are unchanged."""
    if facts.reserve is None or facts.planned is None or not facts.batch_max:
        return facts
    settings, working, planned = moment.settings, facts.working, sum(facts.planned.values())
    each = settings.out_above * facts.batch_max
    needed, late = math.ceil(facts.in_flight / each), facts.wait_s is not None and facts.wait_s > settings.late_s
    held = facts.last_scaled_s is not None and moment.now_s - facts.last_scaled_s < settings.hold_s
    if late and facts.waiting >= _WAITING_SHARE * each:
        missing = needed - working
        soon = min(2 * missing, facts.reclaimable) if facts.reclaimable else min(missing, int(facts.waiting >= each))
        count = working + max(0, soon, _enough(facts, settings.room_out, needed) - working)
    elif late or held or facts.ready < working:
        count = working
    else:
        full = min(working, math.ceil(facts.in_flight / facts.batch_max) - facts.in_reserve)
        count = max(full, _enough(facts, settings.room_in, min(working, needed)))
    more = count - planned
    if more <= 0:
        return facts
    return replace(facts, planned=Counter(facts.planned) + Counter({facts.reserve: more}))


def _enough(facts: EndpointScaleFacts, room: float, most: int) -> int:
    """Instances that serve `room` times the observed demand, at most so many; where it or the profile is not known, so
    many.
    """
    tokens_per_s = facts.tokens_per_s.get(facts.reserve or "")
    if facts.observed_tokens_per_s is None or not tokens_per_s:
        return most
    return min(most, math.ceil(room * facts.observed_tokens_per_s / tokens_per_s))
