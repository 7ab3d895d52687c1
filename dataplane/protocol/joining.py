"""How a node joins the control plane: what it offers. JSON, like all messages (see `messages`)."""

from typing import Annotated

import msgspec

from dataplane.protocol.layouts import check_layout, slots_of
from dataplane.protocol.messages import Count, EngineKind

Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
"""A number of bytes that the database can store."""


class SlotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker group of a node. `memory_bytes`: of all its `gpus` together. `workers` share the GPUs equally; an
    instance is on every worker, so a model must fit on the GPUs of one. `weights_bytes`: the memory of each worker
    for weights; None from agents of older versions. `number`: the slot's on its node; None: its place in the list.
    `hosts`: that the GPUs are of; of more than one they serve one model at a time, on all of them. None from agents of
    older versions.
    """

    gpus: Count
    memory_bytes: Bytes
    workers: Count = 1
    weights_bytes: Bytes | None = None
    number: int | None = None
    hosts: Count | None = None

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            ValueError: the workers have no equal numbers of GPUs, or no memory for weights; or several of them have the
                GPUs of several hosts.
        """
        if self.gpus < 1 or self.workers < 1 or self.gpus % self.workers:
            raise ValueError(f"workers must be at least 1 and divide gpus, {self.gpus}, not {self.workers}")
        if self.weights_bytes is not None and self.weights_bytes < 1:
            raise ValueError(f"weights_bytes must be at least 1, not {self.weights_bytes}")
        hosts = 1 if self.hosts is None else self.hosts
        if hosts < 1 or (hosts > 1 and (self.workers > 1 or self.gpus % hosts)):
            raise ValueError(f"hosts must be at least 1, divide gpus, {self.gpus}, and be 1 for several workers")


Version = Annotated[str, msgspec.Meta(max_length=100, pattern=r"^[!-~]+$")]
"""A version of a package, as its own metadata has it."""


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A node joins. Joining again with the same name replaces its url and slots.

    `host_bytes`: host memory for the models of all its slots; None from agents of older versions. `dtype`: the type of
    weights; None: as stored (a replay), or an agent of an older version. `version`: Tidepool's on the node;
    `engine_version`: of the package behind `engine`. None: not installed as a package, or an older agent. `regroups`:
    the GPUs may be grouped into other slots than these, all alike in memory.
    """

    node: str
    region: str
    gpu_type: str
    url: str
    slots: tuple[SlotSpec, ...]
    engine: EngineKind
    host_bytes: Bytes | None = None
    dtype: str | None = None
    version: Version | None = None
    engine_version: Version | None = None
    regroups: bool = False

    def __post_init__(self) -> None:
        """Check the numbers of slots, and the slots of a node that regroups.

        Raises:
            ValueError: they are no layout, are not numbered as one, or their GPUs differ in memory; or slots of a node
                that does not regroup are numbered.
        """
        numbers = [slot.number for slot in self.slots]
        if not self.regroups:
            if any(number is not None for number in numbers):
                raise ValueError("number: only slots of a node that regroups have one")
            return
        if not self.slots:
            raise ValueError("slots: a node that regroups has at least one")
        layout = tuple(slot.gpus for slot in self.slots)
        check_layout(layout, sum(layout))
        if numbers != list(slots_of(layout)) or any(slot.workers != 1 for slot in self.slots):
            raise ValueError("slots of a node that regroups have one worker, and the number of their first GPU")
        if any(slot.hosts is not None and slot.hosts > 1 for slot in self.slots):
            raise ValueError("slots of a node that regroups are of one host")
        if len({slot.memory_bytes / slot.gpus for slot in self.slots}) > 1:
            raise ValueError("slots of a node that regroups have the same memory_bytes for each GPU")
