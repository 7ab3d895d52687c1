"""LoRA adapters that an instance of their base serves: pure rules of what a node follows and reports of them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from dataplane.protocol.messages import DesiredInstance, InstanceReport


def with_leaving_adapters(
    wanted: Sequence[DesiredInstance], before: Iterable[DesiredInstance], *, is_hosted: Callable[[str], bool]
) -> tuple[DesiredInstance, ...]:
    """What a node follows: the instances that are `wanted`, and of those `before` the adapters that are wanted no more
    while their host is. These drain first, on the engine of their host, so that no answer breaks. `is_hosted`: whether
    an instance is still here.
    """
    engines = {instance.instance_id: instance.model.engine for instance in wanted}
    leaving = (
        msgspec.structs.replace(
            instance, draining=True, model=msgspec.structs.replace(instance.model, engine=engines[instance.host])
        )
        for instance in before
        if instance.host in engines and instance.instance_id not in engines and is_hosted(instance.instance_id)
    )
    return (*wanted, *leaving)


def with_shared_load(reports: Sequence[InstanceReport]) -> tuple[InstanceReport, ...]:
    """Reports in which an instance and the adapters that it serves each have the load of all of them: they share its
    batches and its KV memory, and a request waits for the others' whichever of the models it is for.
    """
    families: dict[str, list[InstanceReport]] = defaultdict(list)
    for report in reports:
        families[report.host or report.instance_id].append(report)
    loads = {host: _load_of(family) for host, family in families.items() if len(family) > 1}
    return tuple(_shared(report, loads.get(report.host or report.instance_id)) for report in reports)


def _load_of(family: Sequence[InstanceReport]) -> dict[str, Any]:
    """The sums of the fields that tell load, by name."""
    received = [each.input_tokens_per_s for each in family if each.input_tokens_per_s is not None]
    counted = ("kv_used_bytes", "remaining_tokens", "running", "waiting")
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in family) for name in counted}
    return sums | {"input_tokens_per_s": sum(received) if received else None}


def _shared(report: InstanceReport, load: dict[str, Any] | None) -> InstanceReport:
    """One with the load of its family. Pooled instances report the KV memory of their slot as it is."""
    if load is None or not report.kv_capacity_bytes:
        return report
    used_bytes = report.kv_used_bytes if report.pooled else load["kv_used_bytes"]
    free_bytes = report.kv_capacity_bytes - report.kv_used_bytes
    own = {"kv_used_bytes": used_bytes, "kv_capacity_bytes": used_bytes + free_bytes}
    return msgspec.structs.replace(report, **load | own)
