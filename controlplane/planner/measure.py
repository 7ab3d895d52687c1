"""Measuring: the last minutes' counts become demand buckets."""

from sqlalchemy.orm import Session

from controlplane.policies.facts import Endpoint
from controlplane.store.demand import IW, DemandRow, put_demand
from controlplane.store.fleet import all_endpoints
from controlplane.store.redis.live import LiveStore

_MINUTES_BACK = 5
_MINUTE_S = 60


def measure(session: Session, live: LiveStore, *, now_s: float) -> int:
    """Write the last five whole minutes; running it again rewrites them. Returns the number of rows.

    A minute in which a gateway was counting is zero where it counted nothing; one without any gateway is a gap.
    """
    endpoints = [Endpoint(model=row.model, region=row.region) for row in all_endpoints(session)]
    this_minute_s = int(now_s) // _MINUTE_S * _MINUTE_S
    rows: list[DemandRow] = []
    for back in range(1, _MINUTES_BACK + 1):
        start_s = this_minute_s - back * _MINUTE_S
        counts = live.read_demand(start_s)
        if counts is None:
            continue
        tokens = {(count.kind, count.endpoint): count.tokens for count in counts}
        for endpoint in endpoints:
            tokens.setdefault((IW, endpoint), 0.0)
        rows += [
            DemandRow(endpoint=endpoint, kind=kind, start_s=start_s, tokens_per_s=count / _MINUTE_S)
            for (kind, endpoint), count in sorted(tokens.items())
        ]
    return put_demand(session, rows) if rows else 0
