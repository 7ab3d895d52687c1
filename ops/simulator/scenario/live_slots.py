"""The slots of a running fleet's nodes as a scenario has them, and which instances find a place there."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Place(NamedTuple):
    """Where an instance is."""

    model: str
    region: str
    gpu_type: str


class Slots(NamedTuple):
    """GPUs of each slot of a node, and whether plans may regroup them."""

    layout: tuple[int, ...]
    regroups: bool

    def keys(self) -> dict[str, Any]:
        """What a scenario says of them: `layout` where they differ or may be regrouped."""
        if self.regroups:
            return {"layout": list(self.layout)}
        if len(set(self.layout)) == 1:
            return {"slots": len(self.layout), "gpus": self.layout[0]}
        return {"layout": list(self.layout), "regroups": False}


def slots_of_node(node: Row) -> Slots:
    """Workers that serve together are slots of their own; in the order of their GPUs where plans may regroup them, else
    the largest first, which every layout may be. Of sizes that no layout has, only the largest is there.
    """
    sizes = _sizes(node)
    if node.get("regroups") and not node.get("layout_held"):
        return Slots(tuple(sizes), regroups=True)
    kept = [size for size in sizes if size == max(sizes)] if lacks_layout(node) else sorted(sizes, reverse=True)
    return Slots(tuple(kept), regroups=False)


def lacks_layout(node: Row) -> bool:
    """Whether the slots of a node differ in size and are no layout, whose sizes are powers of two."""
    sizes = set(_sizes(node))
    return len(sizes) > 1 and any(size & (size - 1) for size in sizes)


def placed(instances: Iterable[Place], gpus: Mapping[Place, int], slots: Iterable[Row]) -> Counter[Place]:
    """The instances that find a slot, those of the most GPUs first, as a simulation starts them. `gpus`: of one at each
    place; `slots`: of which region and GPU type each is, and its GPUs.
    """
    rooms: dict[tuple[str, str], Counter[int]] = {}
    for slot in slots:
        rooms.setdefault((slot["region"], slot["gpu_type"]), Counter())[slot["gpus"]] += 1
    found: Counter[Place] = Counter()
    for place in sorted(instances, key=lambda each: (-gpus[each], each)):
        here = rooms.get((place.region, place.gpu_type), Counter())
        free = min((free for free, count in here.items() if count and free >= gpus[place]), default=None)
        if free is not None:
            here[free] -= 1
            here[free - gpus[place]] += 1
            found[place] += 1
    return found


def _sizes(node: Row) -> list[int]:
    return [slot["gpus"] // slot["workers"] for slot in node["slots"] for _ in range(slot["workers"])]
