"""How tests run `tidepool`, and what it leaves."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controlplane.store.joining import join_node
from controlplane.store.session import Database
from dataplane.protocol.joining import Join, SlotSpec

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]
"""`run("region", "list")`: the outcome of a command."""


def join(
    database: Database,
    name: str,
    *slots: SlotSpec,
    region: str = "us-east",
    gpu_type: str = "H800",
    regroups: bool = False,
) -> None:
    """A node joins, with one slot of eight GPUs unless others are given."""
    chosen = slots or (SlotSpec(gpus=8, memory_bytes=GIB),)
    with database.transaction() as session:
        join_node(
            session,
            Join(
                node=name,
                region=region,
                gpu_type=gpu_type,
                url="http://127.0.0.1:1",
                slots=chosen,
                engine="replay",
                version="0.0.1",
                regroups=regroups,
            ),
        )
