"""The fleet's file of what is there."""

from typing import Any

import yaml

from ops.client.fleet_file.resources import (
    ALIAS,
    ENDPOINT,
    GPU_TYPE,
    LATENCY,
    MODEL,
    PIN,
    PROFILE,
    REGION,
    TENANT,
    Kind,
    Resource,
    Resources,
)


def export_text(present: Resources) -> str:
    """YAML that declares all that is there. What is null is left out: it is the default."""

    def of(kind: Kind) -> list[Resource]:
        return [each for each in present.values() if each.kind is kind]

    models: dict[str, Any] = {each.key[0]: _said(each) for each in of(MODEL)}
    for each in of(PROFILE):
        models[each.key[0]].setdefault("profiles", {})[each.key[1]] = _said(each)
    for each in of(ENDPOINT):
        models[each.key[0]].setdefault("endpoints", {})[each.key[1]] = _said(each)
    for each in of(PIN):
        models[each.key[0]]["endpoints"][each.key[1]]["pin"] = _said(each)
    latencies: dict[str, dict[str, float]] = {}
    for each in of(LATENCY):
        latencies.setdefault(each.key[0], {})[each.key[1]] = each.fields["ms"]
    file = {
        "regions": {each.key[0]: _said(each) for each in sorted(of(REGION), key=lambda each: each.fields["position"])},
        "latencies": latencies,
        "gpu_types": {each.key[0]: _said(each) for each in of(GPU_TYPE)},
        "models": models,
        "aliases": {each.key[0]: _said(each) for each in of(ALIAS)},
        "tenants": {each.key[0]: _said(each) for each in of(TENANT)},
    }
    return str(yaml.safe_dump(file, sort_keys=False, allow_unicode=True, width=120))


def _said(resource: Resource) -> dict[str, Any]:
    return {name: value for name, value in resource.fields.items() if value is not None}
