"""`python -m ops.bench.gateway.isolation_ungated FLAG COMMAND`: a `tidepool` command whose dispatcher releases all
queued requests while the file FLAG exists, however full the endpoints are. Without the file it behaves as usual.
"""

import sys
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

from controlplane.dispatcher import release
from controlplane.policies.decisions import Release
from controlplane.policies.facts import Endpoint, ReleaseFacts
from controlplane.policies.release import ReleaseSettings, choose_releases, has_room

Policy = Callable[[ReleaseFacts, float, ReleaseSettings], tuple[Release, ...]]


def ungated(facts: ReleaseFacts) -> tuple[Release, ...]:
    """Release everything that the dispatcher can send, evenly over the instances of each model, whatever their load and
    windows.
    """
    places: dict[str, list[tuple[Endpoint, str]]] = {}
    for instance in facts.instances:
        places.setdefault(instance.endpoint.model, []).append((instance.endpoint, instance.instance_id))
    releases = (
        Release(endpoint=endpoint, instance_id=instance_id, batch=group.batch, tenant=group.tenant, urgent=True)
        for group in facts.groups
        if group.model in places
        for endpoint, instance_id in islice(cycle(places[group.model]), group.waiting)
    )
    return tuple(islice(releases, facts.count_max))


def switched(gated: Policy, flag: Path) -> Policy:
    """`gated`, or `ungated` while the flag exists."""
    return lambda facts, now_s, settings: ungated(facts) if flag.exists() else gated(facts, now_s, settings)


if __name__ == "__main__":
    flag = Path(sys.argv[1])
    vars(release)["choose_releases"] = switched(choose_releases, flag)
    vars(release)["has_room"] = lambda instances, settings: flag.exists() or has_room(instances, settings)
    from ops.cli.main import main

    main(sys.argv[2:])
