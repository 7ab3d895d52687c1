"""`python -m ops.bench.gateway.isolation_ungated FLAG COMMAND`: a `tidepool` command whose dispatcher releases all
queued requests while the file FLAG exists, however full the endpoints are. Without the file it behaves as usual.
"""

import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

from controlplane.dispatcher import release
from controlplane.policies.decisions import Release
from controlplane.policies.facts import Endpoint, ReleaseFacts
from controlplane.policies.release import ReleaseSettings, choose_releases

Policy = Callable[[ReleaseFacts, float, ReleaseSettings], tuple[Release, ...]]


def ungated(facts: ReleaseFacts) -> tuple[Release, ...]:
    """Release everything, evenly over the endpoints of each model, whatever their load."""
    endpoints: dict[str, set[Endpoint]] = {}
    for instance in facts.instances:
        endpoints.setdefault(instance.endpoint.model, set()).add(instance.endpoint)
    return tuple(
        Release(endpoint=endpoint, batch=group.batch, tenant=group.tenant, count=1)
        for group in facts.groups
        if group.model in endpoints
        for endpoint, _ in zip(cycle(sorted(endpoints[group.model])), range(group.waiting), strict=False)
    )


def switched(gated: Policy, flag: Path) -> Policy:
    """`gated`, or `ungated` while the flag exists."""
    return lambda facts, now_s, settings: ungated(facts) if flag.exists() else gated(facts, now_s, settings)


if __name__ == "__main__":
    vars(release)["choose_releases"] = switched(choose_releases, Path(sys.argv[1]))
    from ops.cli.main import main

    main(sys.argv[2:])
