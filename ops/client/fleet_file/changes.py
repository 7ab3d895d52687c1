"""What it takes to make a fleet as a file declares it: a pure comparison."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from controlplane.declarations import name_fault
from ops.client.fleet_file.resources import (
    ALIAS,
    ENDPOINT,
    GPU_TYPE,
    KINDS,
    LATENCY,
    MODEL,
    PIN,
    PROFILE,
    REGION,
    Key,
    Kind,
    Resource,
    Resources,
)

Action = Literal["create", "change", "delete"]
_REFERENCES = {
    LATENCY.name: (REGION, REGION),
    PROFILE.name: (MODEL, GPU_TYPE),
    ENDPOINT.name: (MODEL, REGION),
}
"""Kind -> the kinds that its key's parts name."""


def references_of(resource: Resource) -> Iterator[tuple[Kind, Key]]:
    """What a thing needs: the kind and the key of each."""
    for kind, name in zip(_REFERENCES.get(resource.kind.name, ()), resource.key, strict=False):
        yield kind, (name,)
    if resource.kind is MODEL and resource.fields.get("base"):
        yield MODEL, (resource.fields["base"],)
    if resource.kind is ALIAS:
        yield from ((MODEL, (model,)) for model in resource.fields["targets"])
    if resource.kind is PIN:
        yield ENDPOINT, resource.key


def is_adapter(resource: Resource) -> bool:
    """Whether it is a LoRA adapter, which needs another model."""
    return resource.kind is MODEL and bool(resource.fields.get("base"))


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change. `before` and `after` are None where there is nothing. `refused`: why it is not even tried; None: it
    is.
    """

    before: Resource | None
    after: Resource | None
    refused: str | None = None

    @property
    def action(self) -> Action:
        return "create" if self.before is None else "delete" if self.after is None else "change"

    @property
    def resource(self) -> Resource:
        resource = self.after or self.before
        assert resource is not None, "a change is of something"
        return resource

    def fields(self) -> dict[str, tuple[Any, Any]]:
        """Fields that change, with their values before and after."""
        old = {} if self.before is None else self.before.fields
        new = {} if self.after is None else self.after.fields
        names = new if self.after is not None else old
        fields = {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}
        if self.before is not None and self.after is not None and self.before.owner != self.after.owner:
            fields["owner"] = (self.before.owner, self.after.owner)
        return fields


def choose_changes(present: Resources, declared: Resources, *, owner: str, adopt: bool) -> list[Change]:
    """What to create and to change, in an order in which each finds what it needs. What is created belongs to `owner`;
    with `adopt`, all that is declared does. A change of what belongs to another is refused, and a new thing whose name
    none may have.
    """
    order = {kind.name: at for at, kind in enumerate(KINDS)}
    changes = [_change(present.get(key), resource, owner=owner, adopt=adopt) for key, resource in declared.items()]
    return sorted(
        (change for change in changes if change.before is None or change.fields()),
        key=lambda change: (order[change.resource.kind.name], is_adapter(change.resource)),
    )


def _change(before: Resource | None, declared: Resource, *, owner: str, adopt: bool) -> Change:
    refused = None
    if before is None and declared.kind in (MODEL, ALIAS) and (fault := name_fault(declared.key[0])) is not None:
        refused = f"name: {fault}"
    if before is None or adopt:
        return Change(before=before, after=replace(declared, owner=owner), refused=refused)
    if before.owner not in (None, owner):
        refused = f"it belongs to '{before.owner}': change it in that file, or take it over with --adopt"
    return Change(before=before, after=replace(declared, owner=before.owner), refused=refused)


def missing_references(present: Resources, declared: Resources) -> list[str]:
    """What the file names and neither has nor finds."""
    return [
        f"{resource.title}: {kind.name} '{' / '.join(key)}' is neither in the file nor registered"
        for resource in declared.values()
        for kind, key in references_of(resource)
        if (kind.name, key) not in present and (kind.name, key) not in declared
    ]
