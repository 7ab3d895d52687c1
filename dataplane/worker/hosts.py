"""The messages between a node's agent and its followers, on the other hosts of a slot."""

import msgspec

from dataplane.protocol.messages import ModelSpec
from dataplane.worker.frames import Configure


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """A follower's report, sent twice a second. `host`: its number among those of the slot, the agent's being 0.
    `hostname`: as its kernel says, None from followers of older versions; `boot_id`: of this run of the follower.
    `check`: the serial of the last CheckOrder, whose answer is `digest`, or `error`, or neither yet. `launch`: the
    serial of the last LaunchOrder; `ended`: why its ranks run no more.
    """

    slot: int
    host: int
    boot_id: str
    version: str | None
    engine_version: str | None
    hostname: str | None = None
    check: str | None = None
    digest: str | None = None
    error: str | None = None
    launch: str | None = None
    ended: str | None = None


class CheckOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Have a model's checkpoint on this host, and tell its digest."""

    serial: str
    path: str


class LaunchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Run this host's ranks of a model. `model.path` is the source; `digest`: of its checkpoint, on which all hosts
    agreed; `configure` is what the head's own worker got.
    """

    serial: str
    configure: Configure
    model: ModelSpec
    digest: str


class HostOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a HostReport. `launch` None: run no ranks."""

    check: CheckOrder | None = None
    launch: LaunchOrder | None = None
