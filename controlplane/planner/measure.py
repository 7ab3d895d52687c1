"""Measure demand: the counts of the last minutes become rows of demand."""

from itertools import chain

from sqlalchemy.orm import Session

from controlplane.policies.demand import serving_model
from controlplane.policies.facts import Endpoint
from controlplane.store.adapters import served_bases
from controlplane.store.demand import IW, NIW, DemandRow, note_measured, put_demand, read_demand
from controlplane.store.fleet import all_endpoints
from controlplane.store.redis.live import LiveStore

_MINUTES_BACK = 5
_MINUTE_S = 60


def measure(session: Session, live: LiveStore, *, now_s: float) -> int:
    """Write the demand of the last five whole minutes, except rows that are stored already: so all of the newest
    minute, and late counts of the others. Returns the number of rows.

    If any gateway reported in a minute, endpoints without a count had zero demand, which takes no row; otherwise the
    minute is missing data. What came for an adapter that is served with its base is demand for the base.
    """
    until_s = int(now_s) // _MINUTE_S * _MINUTE_S
    since_s = until_s - _MINUTES_BACK * _MINUTE_S
    counted = {start_s: live.read_demand(start_s) for start_s in range(since_s, until_s, _MINUTE_S)}
    minutes = [start_s for start_s, counts in counted.items() if counts is not None]
    endpoints = [Endpoint(model=row.model, region=row.region) for row in all_endpoints(session)]
    note_measured(session, endpoints, minutes=minutes)
    rates = dict.fromkeys(((IW, endpoint, start_s) for endpoint in endpoints for start_s in minutes), 0.0)
    bases = served_bases(session)
    for each in chain.from_iterable(counts or () for counts in counted.values()):
        model, region = serving_model(each.endpoint.model, bases), each.endpoint.region
        key = each.kind, Endpoint(model=model, region=region), each.start_s
        rates[key] = rates.get(key, 0.0) + each.tokens / _MINUTE_S
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
