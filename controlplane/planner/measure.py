"""Measuring: the last minutes' counts become demand buckets."""

from sqlalchemy.orm import Session

from controlplane.policies.facts import Endpoint
from controlplane.store.demand import IW, NIW, DemandRow, note_measured, put_demand, read_demand
from controlplane.store.fleet import all_endpoints
from controlplane.store.redis.live import LiveStore

_MINUTES_BACK = 5
_MINUTE_S = 60


def measure(session: Session, live: LiveStore, *, now_s: float) -> int:
    """Write what the last five whole minutes came to, where that is not known already: of the newest all, of the others
    what was counted late. Returns the number of rows.

    A minute in which a gateway was counting is zero where it counted nothing, and takes no row there; one without any
    gateway is a gap.
    """
    until_s = int(now_s) // _MINUTE_S * _MINUTE_S
    since_s = until_s - _MINUTES_BACK * _MINUTE_S
    counted = {start_s: live.read_demand(start_s) for start_s in range(since_s, until_s, _MINUTE_S)}
    minutes = [start_s for start_s, counts in counted.items() if counts is not None]
    endpoints = [Endpoint(model=row.model, region=row.region) for row in all_endpoints(session)]
    note_measured(session, endpoints, minutes=minutes)
    rates = dict.fromkeys(((IW, endpoint, start_s) for endpoint in endpoints for start_s in minutes), 0.0)
    for counts in counted.values():
        rates |= {(each.kind, each.endpoint, each.start_s): each.tokens / _MINUTE_S for each in counts or ()}
    known = {
        (kind, endpoint, start_s): tokens_per_s
        for kind in (IW, NIW)
        for endpoint, series in read_demand(session, kind=kind, since_s=since_s, until_s=until_s).items()
        for start_s, tokens_per_s in series
    }
    rows = [
        DemandRow(endpoint=endpoint, kind=kind, start_s=start_s, tokens_per_s=tokens_per_s)
        for (kind, endpoint, start_s), tokens_per_s in sorted(rates.items())
        if known.get((kind, endpoint, start_s)) != tokens_per_s
    ]
    return put_demand(session, rows) if rows else 0
